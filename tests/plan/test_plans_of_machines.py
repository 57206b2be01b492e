"""Plans for recorded facts of machines, as docs/auto.md prints them; and bad files of facts."""

import json
from pathlib import Path

import pytest

from bert_pretrain.config import duration_text
from bert_pretrain.errors import ConfigError
from bert_pretrain.plan import law
from bert_pretrain.plan.machine_facts import SHIPPED, SIZES, Size, read_machine
from bert_pretrain.plan.planner import Plan, make_plan
from bert_pretrain.plan.text_facts import TextFacts
from bert_pretrain.plan.timing import measure_machine

DOCS = Path(__file__).parents[2] / "docs" / "auto.md"
EN_MAIN = TextFacts(95e6, 6982.0, 87.5, 0.0, 0.0, is_divisible=True)
SIXTEEN_GB = TextFacts(16e9, 1.2e6, 87.5, 0.0, 0.0, is_divisible=True)
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


def row(name: str, text: TextFacts, seconds: float, made: Plan) -> str:
    """The row of the docs' table."""
    config, best = made.config, made.training
    low, high = best.forecast.mlm_loss
    batch = f"{config.train.global_batch_size:,} × {config.data.max_seq_length}"
    steps = 1e6 * best.tokens / (config.train.global_batch_size * config.data.max_seq_length)
    cells = [
        name, f"{text.num_bytes / 1e6:,.0f} MB", duration_text(seconds), duration_text(made.seconds),
        f"L{best.size.layers}-H{best.size.hidden}", batch, f"{config.train.peak_lr:g}", f"{best.tokens:,.0f}",
        f"{best.epochs:.1f}", f"{steps:,.0f}", f"{low:.2f}–{high:.2f}", "yes" if best.forecast.beyond else "no",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize(
    ("name", "text", "seconds", "sizes"),
    [
        ("h100", EN_MAIN, 6 * MINUTE, {Size(4, 512), Size(8, 512)}),
        ("h100", EN_MAIN, HOUR, {Size(8, 512)}),
        ("h100", EN_MAIN, DAY, {Size(8, 512)}),
        ("h100", SIXTEEN_GB, 4 * DAY, {Size(12, 768), Size(24, 1024)}),
        ("t4", EN_MAIN, HOUR, {Size(4, 512), Size(8, 512)}),
        ("cpu2", EN_MAIN, 2 * MINUTE, {Size(2, 128)}),
        ("cpu2", EN_MAIN, HOUR, {Size(2, 256)}),
        ("cpu2", EN_MAIN, DAY, {Size(2, 256), Size(4, 256), Size(4, 512)}),
    ],
)
def test_plans_are_those_of_the_docs(name: str, text: TextFacts, seconds: float, sizes: set[Size]) -> None:
    facts = read_machine(name)
    made = make_plan(("corpus",), text, facts, seconds)
    assert row(name, text, seconds, made) in DOCS.read_text(encoding="utf-8").splitlines()
    assert made.training.size in sizes
    train, length = made.config.train, made.config.data.max_seq_length
    batch = train.global_batch_size * length
    reached, best = (
        facts.tokens_per_second(made.training.size, made.config.vocab.size, length, each) for each in (batch, 1 << 20)
    )
    assert reached > (0.85 if facts.device == "cuda" else 0.5) * best
    assert 1e6 * made.training.tokens / batch > (law.MIN_STEPS if facts.device == "cuda" else 300)


def test_the_range_outside_the_fit_contains_the_run_that_was_recorded() -> None:
    """At its rate, which was too high, it would not have been planned today."""
    recorded = law.forecast(Size(4, 512), 30_522, 46.6, 2.0, is_chinese=False, batch_tokens=4096)
    assert recorded.beyond
    assert recorded.mlm_loss[0] < 4.33 < recorded.mlm_loss[1]
    large = law.forecast(Size(2, 256), 30_522, 9.0, 1.0, is_chinese=False, batch_tokens=1 << 16)
    assert large.beyond


def test_without_time_only_the_smallest_network_is_timed_and_the_others_are_extrapolated() -> None:
    facts = measure_machine(0.0, 5000, "cpu")
    assert [speed.size for speed in facts.speeds] == list(SIZES)
    assert [speed.size for speed in facts.speeds if speed.is_timed] == [SIZES[0]]
    smallest = facts.speed(SIZES[0])
    assert {speed.flops_per_second for speed in facts.speeds} == {smallest.flops_per_second}
    # Twice the width and the same layers: four times the weights, each multiplied by twice the width.
    assert facts.speed(Size(2, 256)).update_seconds == pytest.approx(8 * smallest.update_seconds)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_facts_say_where_they_come_from_and_larger_networks_need_more_time(path: Path, tmp_path: Path) -> None:
    facts = read_machine(path.stem)
    assert ("not measured" in facts.source) is not any(speed.is_timed for speed in facts.speeds)
    rates = [facts.tokens_per_second(size, 30_522, 128, 1 << 20) for size in facts.sizes]
    assert rates == sorted(rates, reverse=True)
    (tmp_path / "machine.json").write_text(facts.model_dump_json())
    assert read_machine(str(tmp_path / "machine.json")) == facts


@pytest.mark.parametrize("name", ["missing.json", ".", "h1000"])
def test_an_unknown_name_gets_those_that_are_known(name: str) -> None:
    with pytest.raises(ConfigError, match="no machine"):
        read_machine(name)


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        (None, "version", 2),
        (None, "memory_bytes", 0),
        (None, "speeds", []),
        (None, "device", "tpu"),
        (None, "note", "more"),
        (0, "flops_per_second", 0.0),
        (0, "flops_per_second", "inf"),
        (0, "update_seconds", -1.0),
        (0, "hidden", 200),
    ],
)
def test_a_wrong_file_of_facts_is_refused_by_its_key(
    tmp_path: Path, place: int | None, key: str, value: object
) -> None:
    facts = json.loads(read_machine("t4").model_dump_json())
    (facts if place is None else facts["speeds"][place])[key] = value
    (tmp_path / "machine.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=key):
        read_machine(str(tmp_path / "machine.json"))

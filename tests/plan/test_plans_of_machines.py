"""Plans for recorded facts of machines, as docs/auto.md prints them: `python -m tests.plan.test_plans_of_machines`."""

from pathlib import Path

import pytest

from bert_pretrain.config import duration_text
from bert_pretrain.plan import law
from bert_pretrain.plan.facts import BYTES_PER_WEIGHT, MachineFacts, Size, TextFacts, read_machine
from bert_pretrain.plan.planner import FAST_SHARE, RunPlan, Training, plan_run
from bert_pretrain.train.flops import PEAK_BF16_FLOPS

DOCS = Path(__file__).parents[2] / "docs" / "auto.md"
EN_MAIN = TextFacts(95e6, 6982.0, 87.5, 0.0, 0.0, is_divisible=True)
SIXTEEN_GB = TextFacts(16e9, 1.2e6, 87.5, 0.0, 0.0, is_divisible=True)
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
PLANS = [
    ("h200", EN_MAIN, 6 * MINUTE, {Size(4, 512), Size(8, 512)}),
    ("h100", EN_MAIN, 6 * MINUTE, {Size(4, 512), Size(8, 512)}),
    ("h100", EN_MAIN, HOUR, {Size(8, 512)}),
    ("h100", EN_MAIN, DAY, {Size(8, 512)}),
    ("h100", SIXTEEN_GB, 4 * DAY, {Size(12, 768), Size(24, 1024)}),
    ("t4", EN_MAIN, HOUR, {Size(4, 512), Size(8, 512)}),
    ("cpu2", EN_MAIN, 2 * MINUTE, {Size(2, 128)}),
    ("cpu2", EN_MAIN, HOUR, {Size(2, 256)}),
    ("cpu2", EN_MAIN, DAY, {Size(2, 256), Size(4, 256), Size(4, 512)}),
]


def share_of_best(facts: MachineFacts, best: Training) -> float:
    """Tokens per second with the planned batch over those with the best one."""
    speeds = [
        facts.tokens_per_second(best.size, best.vocab_size, best.length, batch)
        for batch in (best.batch_tokens, *law.BATCHES)
    ]
    return speeds[0] / max(speeds)


def mfu(facts: MachineFacts, best: Training) -> float | None:
    """Model FLOPs utilisation of the training by the facts; None without a known peak."""
    speed = facts.tokens_per_second(best.size, best.vocab_size, best.length, best.batch_tokens)
    peak = PEAK_BF16_FLOPS.get(facts.name.upper())
    return None if peak is None else speed * best.size.flops_per_token(best.vocab_size, best.length) / peak


def row(name: str, text: TextFacts, seconds: float) -> str:
    """The row of the docs' table."""
    facts = read_machine(name)
    made = plan_run(("corpus",), text, facts, seconds)
    train, best = made.config.train, made.training
    low, high = best.forecast.mlm_loss
    utilisation = mfu(facts, best)
    cells = [
        name, f"{text.num_bytes / 1e6:,.0f} MB", duration_text(seconds), duration_text(made.seconds), best.size,
        f"{train.global_batch_size:,} × {best.length}", f"{train.peak_lr:g}", f"{best.tokens:,.0f}",
        f"{best.epochs:.1f}", f"{best.steps:,.0f}", f"{share_of_best(facts, best):.2f}",
        "–" if utilisation is None else f"{utilisation:.0%}", f"{low:.2f}–{high:.2f}",
        "yes" if best.forecast.beyond else "no",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


@pytest.mark.parametrize(("name", "text", "seconds", "sizes"), PLANS)
def test_plans_are_those_of_the_docs(name: str, text: TextFacts, seconds: float, sizes: set[Size]) -> None:
    facts = read_machine(name)
    made = plan_run(("corpus",), text, facts, seconds)
    assert row(name, text, seconds) in DOCS.read_text(encoding="utf-8").splitlines()
    assert made.training.size in sizes
    assert share_of_best(facts, made.training) >= FAST_SHARE
    assert made.training.steps > 10 * law.CURVES["en"].lost_steps


def test_a_card_of_4_gb_or_without_bf16_has_a_plan_that_fits() -> None:
    facts = read_machine("t4").model_copy(update={"memory_bytes": 4 * 10**9})
    made: RunPlan = plan_run(("corpus",), SIXTEEN_GB, facts, 4 * DAY)
    assert BYTES_PER_WEIGHT * made.training.size.weights < 4e9
    assert made.config.train.precision == "auto"  # fp16 on a T4
    assert made.config.train.micro_batch_tokens == "auto"


if __name__ == "__main__":
    print("\n".join(row(name, text, seconds) for name, text, seconds, _ in PLANS))

"""What a machine can do: what is timed, what is extrapolated, the speed of other batches, and files of facts."""

import json
from pathlib import Path

import pytest

from bert_pretrain.errors import ConfigError
from bert_pretrain.plan.machine_facts import SHIPPED, SIZES, MachineFacts, Size, Speed, read_machine
from bert_pretrain.plan.timing import measure_machine


def test_without_time_only_the_smallest_network_is_timed_and_the_others_are_extrapolated() -> None:
    facts = measure_machine(0.0, 5000, "cpu")
    assert [speed.size for speed in facts.speeds] == list(SIZES)
    assert [speed.size for speed in facts.speeds if speed.is_timed] == [SIZES[0]]
    smallest = facts.speed(SIZES[0])
    assert smallest.update_seconds > 0
    assert {speed.flops_per_second for speed in facts.speeds} == {smallest.flops_per_second}
    # Twice the width and the same layers: four times the weights, each multiplied by twice the width.
    assert facts.speed(Size(2, 256)).update_seconds == pytest.approx(8 * smallest.update_seconds)


@pytest.mark.parametrize("update", [0.5, 0.0])
def test_update_and_launches_count_less_the_larger_the_batch(update: float) -> None:
    size = Size(2, 256)
    step = 2048 * size.flops_per_token(8192, 64) / 1e11
    speed = Speed(layers=2, hidden=256, flops_per_second=1e11, update_seconds=update * step, launch_seconds=2 * step)
    facts = MachineFacts(cores=2, memory_bytes=1 << 30, speeds=[speed])
    fastest = 2048 / step
    assert facts.tokens_per_second(size, 8192, 64, 2048) == pytest.approx(fastest / 2)
    assert facts.tokens_per_second(size, 8192, 64, 4 * 2048) == pytest.approx(fastest * 4 / (4 + update))


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_facts_say_where_they_come_from_and_larger_networks_need_more_time(path: Path) -> None:
    facts = read_machine(path.stem)
    assert facts.name == path.stem
    measured = any(speed.is_timed for speed in facts.speeds)
    assert ("not measured" in facts.source) is not measured
    rates = [facts.tokens_per_second(size, 30_522, 128, 1 << 20) for size in facts.sizes]
    assert rates == sorted(rates, reverse=True)


def test_facts_are_kept_in_a_file(tmp_path: Path) -> None:
    facts = read_machine("h100")
    (tmp_path / "machine.json").write_text(facts.model_dump_json())
    assert read_machine(str(tmp_path / "machine.json")) == facts


@pytest.mark.parametrize(
    ("key", "value"),
    [("version", 2), ("memory_bytes", 0), ("cores", 0), ("speeds", []), ("device", "tpu"), ("note", "more")],
)
def test_a_wrong_file_of_facts_is_refused_by_its_key(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**json.loads(read_machine("h100").model_dump_json()), key: value}))
    with pytest.raises(ConfigError, match=key):
        read_machine(str(path))


def test_zeros_are_refused_and_an_unknown_name_gets_those_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(read_machine("h100").model_dump_json().replace("37700000000000.0", "0"))
    with pytest.raises(ConfigError, match=r"flops_per_second"):
        read_machine(str(path))
    with pytest.raises(ConfigError, match="h100"):
        read_machine("h1000")

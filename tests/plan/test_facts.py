"""Facts of a corpus from a sample, and facts of machines: measured, extrapolated, shipped and from files."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_pretrain.config import DataConfig, TrainConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.plan import timing
from bert_pretrain.plan.facts import (
    SAMPLE_BYTES,
    SHIPPED,
    SIZES,
    Size,
    Speed,
    TextFacts,
    measure_text,
    read_machine,
    shipped_facts,
)
from bert_pretrain.plan.timing import MIN_TIMED_NETWORKS, extrapolated, measure_machine, speed_of
from bert_pretrain.text import documents


def test_a_small_corpus_is_known_exactly(tmp_path: Path) -> None:
    documents = [[f"Sentence {number} of document {place}." for number in range(place + 1)] for place in range(1, 6)]
    text = "\n\n".join("\n".join(lines) for lines in documents) + "\n"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    facts = measure_text([str(tmp_path / "a.txt")], DataConfig())
    num_bytes = len(text) - 2 * len(documents) + 1  # without the lines between documents
    assert facts == TextFacts(num_bytes, 5, 4, 0.0, 0.0, is_divisible=True)
    assert measure_text([str(tmp_path / "a.txt.gz")], DataConfig()).vocab_reads_all


def test_script_and_single_sentences_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "国家图书馆在北京。\n\nabcd.\n\n" + "这是一个很长的句子,它在每一页的下面都出现一次。\n\n" * 8
    )
    facts = measure_text([str(tmp_path / "a.txt")], DataConfig())
    assert facts.single_sentence_share == 1.0
    assert 0.9 < facts.cjk_share < 1.0


def test_escapes_and_other_fields_of_records_are_not_counted(tmp_path: Path) -> None:
    texts = ["Они жили долго. Они жили счастливо.", "Они ушли. Никто не вернулся."]
    lines = (json.dumps({"text": text, "address": "https://example.org/" * 9}) for text in texts)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    facts = measure_text([str(tmp_path / "a.jsonl")], DataConfig())
    assert facts.num_bytes == sum(len(text.encode()) for text in texts)


def test_an_error_in_the_sample_names_the_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "One. Two."}\n{"text": "cut\n' * 50)
    with pytest.raises(InputError) as caught:
        measure_text([str(tmp_path / "a.jsonl")], DataConfig(language="en", strict=True))
    assert caught.value.where.startswith(str(tmp_path / "a.jsonl"))


def test_a_fraction_of_a_large_table_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"Number {number} begins. Number {number} ends." for number in range(9000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=1000)
    (tmp_path / "b.csv").write_text("text\n" + "\n".join(texts))
    for part_bytes, is_divisible in ((documents.PART_BYTES, False), (10_000, True)):
        monkeypatch.setattr(documents, "PART_BYTES", part_bytes)
        assert measure_text([str(tmp_path / "a.parquet")], DataConfig()).is_divisible == is_divisible
        assert not measure_text([str(tmp_path / "b.csv")], DataConfig()).is_divisible


def test_a_configured_fraction_is_all_the_text_of_a_plan(tmp_path: Path) -> None:
    texts = [f"Number {number} begins. Number {number} ends." for number in range(30_000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    whole, part = (measure_text([str(tmp_path / "a.jsonl")], DataConfig(fraction=share)) for share in (1.0, 0.1))
    assert (part.num_bytes, part.documents) == pytest.approx((0.1 * whole.num_bytes, 0.1 * whole.documents))
    assert (whole.is_divisible, part.is_divisible) == (True, False)


def test_a_large_archive_is_sampled_and_scaled(tmp_path: Path) -> None:
    document = "A sentence like many others.\n" * 40 + "\n"
    number = 3 * SAMPLE_BYTES // len(document)
    with gzip.open(tmp_path / "a.txt.gz", "wt", compresslevel=1) as file:
        for place in range(number):
            file.write(f"Number {place} {place * 7919 % 10007}.\n{document}")
    facts = measure_text([str(tmp_path / "a.txt.gz")], DataConfig())
    assert facts.documents == pytest.approx(number, rel=0.2)
    assert facts.num_bytes == pytest.approx(3 * SAMPLE_BYTES, rel=0.2)
    assert facts.sentences_per_document == 41


PARAGRAPH = "It began in the morning. The train was late, as it often was. Nobody minded, and so we waited."


@pytest.mark.parametrize(("between", "boundary"), [("\n\n", "blank_line"), ("\n", "line")])
def test_for_large_files_of_running_text_another_boundary_is_found(tmp_path: Path, between: str, boundary: str) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(between.join(f"{number} {place}. {PARAGRAPH}" for place in range(40)))
    facts = measure_text([str(tmp_path)], DataConfig())
    assert (facts.boundary, facts.documents_as_configured, facts.documents) == (boundary, 3, 120)
    as_configured = measure_text([str(tmp_path)], DataConfig(document_boundary="file"))
    assert (as_configured.boundary, as_configured.documents, as_configured.is_divisible) == ("", 3, False)
    wrapped = tmp_path / "wrapped.txt"  # whose lines are no documents
    wrapped.write_text("\n".join(["a line without its end, as in a book that was"] * 100))
    assert measure_text([str(wrapped)], DataConfig()).boundary == ""


def test_large_file_of_one_document_counts_as_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{PARAGRAPH} " * (3 * SAMPLE_BYTES // len(PARAGRAPH)))
    facts = measure_text([str(tmp_path / "a.txt")], DataConfig())
    assert facts.documents == 1
    assert facts.sentences_per_document == pytest.approx(3 * facts.num_bytes / len(PARAGRAPH), rel=0.2)


def test_without_time_only_the_smallest_network_is_timed_and_the_others_are_extrapolated() -> None:
    facts = measure_machine(0.0, 5000, TrainConfig(device="cpu"))
    assert [speed.size for speed in facts.speeds] == list(SIZES)
    assert [speed.size for speed in facts.speeds if speed.is_timed] == [SIZES[0]]
    smallest = facts.speed(SIZES[0])
    ratios = {
        speed.flops_per_second / read_machine("cpu2").speed(speed.size).flops_per_second for speed in facts.speeds
    }
    assert max(ratios) == pytest.approx(min(ratios))
    known = read_machine("cpu2")
    share = known.speed(Size(2, 256)).update_seconds / known.speed(SIZES[0]).update_seconds
    assert facts.speed(Size(2, 256)).update_seconds == pytest.approx(share * smallest.update_seconds)


@pytest.mark.parametrize(("latest_start", "number"), [(0.0, 1), (1.5, 2), (1000.0, MIN_TIMED_NETWORKS)])
def test_networks_that_start_before_latest_start_may_exceed_the_time(
    monkeypatch: pytest.MonkeyPatch, latest_start: float, number: int
) -> None:
    clock = [0.0]

    def measured(size: Size, *_: object) -> Speed:
        clock[0] += 1.0  # the first network ends at 1 s, the second one at 2
        return Speed(layers=size.layers, hidden=size.hidden, flops_per_second=1e12, update_seconds=0.01)

    monkeypatch.setattr(timing, "_measure_speed", measured)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    facts = measure_machine(0.5, 5000, TrainConfig(device="cpu"), latest_start)
    assert [speed.is_timed for speed in facts.speeds] == [True] * number + [False] * (len(SIZES) - number)


@pytest.mark.parametrize(
    ("name", "memory", "is_known"),
    [
        ("NVIDIA H200", 150e9, True),
        ("NVIDIA H200", 75e9, False),
        ("NVIDIA H200 NVL", 150e9, False),
        ("NVIDIA H200 MIG 7g.141gb", 150e9, False),
        ("NVIDIA GH200 480GB", 150e9, False),
        ("NVIDIA H100 80GB HBM3", 85e9, False),  # not timed
        ("Another", 150e9, False),
        ("", 150e9, False),
    ],
)
def test_shipped_facts_are_those_of_a_card_by_name_and_memory_if_it_was_timed(
    name: str, memory: float, is_known: bool
) -> None:
    facts = shipped_facts(name, int(memory), 8)
    assert (facts is not None) == is_known
    if facts is not None:
        assert (facts.name, facts.cores, facts.speeds) == ("h200", 8, read_machine("h200").speeds)
        assert facts.source.startswith("shipped facts of this card")


def test_last_two_batch_sizes_determine_flops_and_update_time() -> None:
    # 2 s of update, 10 operations a second; the smallest step is bound by launches.
    speed = speed_of(Size(2, 128), [(10.0, 5.0), (80.0, 10.0), (640.0, 66.0)], None, has_launches=True)
    assert (speed.flops_per_second, speed.update_seconds, speed.launch_seconds) == (10.0, 2.0, 5.0)
    assert speed_of(Size(2, 128), [(10.0, 5.0)], 3.0, has_launches=False).flops_per_second == 5.0
    noisy = speed_of(Size(2, 128), [(10.0, 5.0), (80.0, 4.0)], None, has_launches=True)
    assert noisy.flops_per_second == pytest.approx(70.0 / 0.4)
    assert noisy.seconds(80.0) == pytest.approx(4.0)


def test_speeds_of_a_shipped_machine_follow_from_its_smallest_network() -> None:
    facts = read_machine("h200")
    for speed in facts.speeds:
        found = extrapolated(speed.size, facts.speeds[0], "cuda")
        assert found.flops_per_second == pytest.approx(speed.flops_per_second)
        assert found.update_seconds == pytest.approx(speed.update_seconds)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_facts_say_where_they_come_from_and_larger_networks_need_more_time(path: Path, tmp_path: Path) -> None:
    facts = read_machine(path.stem)
    assert ("not measured" in facts.source) is not any(speed.is_timed for speed in facts.speeds)
    rates = [facts.tokens_per_second(size, 30_522, 128, 1 << 20) for size in facts.sizes]
    assert rates == sorted(rates, reverse=True)
    (tmp_path / "machine.json").write_text(facts.model_dump_json())
    assert read_machine(str(tmp_path / "machine.json")) == facts


@pytest.mark.parametrize("name", ["missing.json", ".", "h1000"])
def test_unknown_machine_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="no machine"):
        read_machine(name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 2),
        ("memory_bytes", 0),
        ("speeds", []),
        ("device", "tpu"),
        ("note", "more"),
        ("flops_per_second", "inf"),
    ],
)
def test_error_about_a_machine_file_names_the_key(tmp_path: Path, key: str, value: object) -> None:
    facts = json.loads(read_machine("t4").model_dump_json())
    (facts["speeds"][0] if key in facts["speeds"][0] else facts)[key] = value
    (tmp_path / "machine.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=key):
        read_machine(str(tmp_path / "machine.json"))

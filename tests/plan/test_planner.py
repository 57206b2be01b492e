"""The planner: a pure function from facts to a configuration with reasons."""

from dataclasses import replace
from typing import Any

import pytest

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.plan import law
from bert_pretrain.plan.facts import MASKED_SHARE, SIZES, MachineFacts, Speed, TextFacts
from bert_pretrain.plan.planner import MIN_SECONDS, RunPlan, plan_run
from bert_pretrain.report.diagnosis import too_large

ENGLISH = TextFacts(
    num_bytes=100e6, documents=7000, sentences_per_document=100, single_sentence_share=0.0, cjk_share=0.0,
    is_divisible=True,
)  # fmt: skip


def machine(flops: float = 1e11) -> MachineFacts:
    speeds = [
        Speed(layers=size.layers, hidden=size.hidden, flops_per_second=flops, update_seconds=0.0) for size in SIZES
    ]
    return MachineFacts(cores=2, memory_bytes=32 << 30, speeds=speeds)


def english(megabytes: float, **more: Any) -> TextFacts:
    return replace(ENGLISH, **{"num_bytes": 1e6 * megabytes, "documents": 100 * megabytes, **more})


def plan(text: TextFacts = ENGLISH, seconds: float = 600.0, flops: float = 1e11) -> RunPlan:
    return plan_run(("corpus.txt",), text, machine(flops), seconds)


def test_the_same_facts_give_the_same_plan_and_every_choice_has_a_reason() -> None:
    made = plan()
    assert made == plan()
    keys = [line for line in made.yaml.splitlines() if line.startswith("  ")]
    assert all("  # " in line for line in keys)
    assert len({line.partition(":")[0] for line in keys}) == len(keys) > 25
    assert (made.config.inputs, made.config.time, made.config.phases) == (("corpus.txt",), 600.0, ())
    assert made.config.data.masked_lm_prob == MASKED_SHARE > Config().data.masked_lm_prob


def test_more_time_or_a_faster_machine_gives_a_network_that_is_no_smaller_and_expects_less_loss() -> None:
    plans = [plan(seconds=seconds) for seconds in (120, 600, 3600, 36_000, 360_000)]
    weights = [made.training.size.weights for made in plans]
    losses = [made.training.forecast.loss for made in plans]
    for made in plans:
        low, high = made.training.forecast.mlm_loss
        assert low < made.training.loss < high
        assert f"{made.training.loss:.2f} nats expected" in made.yaml
    assert weights == sorted(weights)
    assert losses == sorted(losses, reverse=True)
    assert weights[-1] > weights[0]
    assert plan(flops=1e14).training.size.weights > plan(flops=1e11).training.size.weights
    near, far = plans[0].training.forecast, plan(seconds=3_600_000).training.forecast
    assert (near.beyond, bool(far.beyond)) == ("", True)
    assert far.mlm_loss[1] / far.mlm_loss[0] > near.mlm_loss[1] / near.mlm_loss[0]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ({}, "next_sentence", "nsp"),
        ({"single_sentence_share": 0.9, "sentences_per_document": 1}, "next_sentence", "none"),
        ({"documents": 2.0}, "next_sentence", "sop"),
        ({"cjk_share": 0.9}, "language", "zh"),
        ({}, "document_boundary", "auto"),
        ({"boundary": "blank_line", "documents_as_configured": 3.0}, "document_boundary", "blank_line"),
        ({"is_divisible": False}, "fraction", 1.0),
    ],
)
def test_properties_of_the_text_determine_the_data_section(text: dict[str, Any], key: str, value: object) -> None:
    assert getattr(plan(replace(ENGLISH, **text)).config.data, key) == value


@pytest.mark.parametrize("num_bytes", [1e5, 1e8])
@pytest.mark.parametrize(("documents", "pairs"), [(1.0, "sop"), (9.0, "sop"), (10.0, "sop"), (20.0, "nsp")])
def test_no_more_than_a_tenth_of_the_text_is_held_out(num_bytes: float, documents: float, pairs: str) -> None:
    data = plan(replace(ENGLISH, num_bytes=num_bytes, documents=documents)).config.data
    assert data.next_sentence == pairs
    assert data.validation_fraction <= 0.1
    assert round(data.validation_fraction * documents) >= (0 if documents < 10 else 2 if pairs == "nsp" else 1)


def test_a_long_training_holds_out_no_more_than_make_data_by_default() -> None:
    text, data = english(1e4), plan(english(1e4), 30 * 86_400.0).config.data
    assert data.fraction == 1.0
    assert data.validation_fraction * text.tokens == pytest.approx(10_000 * 128, rel=0.05)


def test_a_short_training_is_evaluated_on_several_documents() -> None:
    text, config = ENGLISH, plan(seconds=120.0).config
    read = text.documents * config.data.fraction
    assert config.data.validation_fraction * read >= 15
    assert config.train.eval_examples == 256


def test_small_text_is_repeated_at_most_max_epochs_times_and_ends_early() -> None:
    hour, day = (plan(english(1), seconds) for seconds in (3600.0, 86_400.0))
    assert day.training.epochs == hour.training.epochs == law.MAX_EPOCHS
    assert day.config.data.dupe_factor > plan(seconds=120).config.data.dupe_factor == 1
    assert day.seconds == pytest.approx(hour.seconds, rel=0.02)
    assert MIN_SECONDS <= day.seconds == day.config.time < 3600.0
    assert "more passes help little" in day.yaml
    assert plan(seconds=3600.0).seconds == 3600.0
    assert "more passes help little" not in plan(seconds=3600.0).yaml


@pytest.mark.parametrize(
    ("text", "seconds", "word"),
    [
        (english(20e3, is_divisible=False), 600.0, "20,000 MB"),
        (english(20e3, vocab_reads_all=True), 600.0, "compressed"),
    ],
)
def test_too_little_time_is_refused(text: TextFacts, seconds: float, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        plan(text, seconds)


@pytest.mark.parametrize(
    ("megabytes", "cjk_share", "size"),
    [(0.5, 0.0, 4096), (1.5, 0.0, 8192), (5, 0.0, 30_522), (20e3, 0.0, 30_522), (98, 0.9, 8192), (5e3, 0.9, 21_128)],
)
def test_the_vocabulary_grows_with_the_text(megabytes: float, cjk_share: float, size: int) -> None:
    assert plan(english(megabytes, cjk_share=cjk_share), 86_400, flops=1e14).config.vocab.size == size


def test_long_trainings_end_with_long_examples() -> None:
    config = plan(seconds=100_000).config
    short, long = map(config.for_phase, config.phases)
    assert (short.data.max_seq_length, long.data.max_seq_length) == (128, 512)
    assert long.train.global_batch_size * 4 == short.train.global_batch_size
    assert long.train.peak_lr < short.train.peak_lr


def test_large_corpus_is_read_in_part() -> None:
    for megabytes in (1e3, 1e6):
        made = plan(english(megabytes))
        assert 10 <= made.config.data.fraction * megabytes < 0.4 * 600 * 2 * 2.5
        assert made.training.epochs < 1.0
    plain, packed = (plan(english(2e3, vocab_reads_all=reads_all), flops=1e13) for reads_all in (False, True))
    assert packed.config.data.fraction < plain.config.data.fraction
    assert plan(seconds=36_000).config.data.fraction == 1.0
    few = plan(english(1e3, documents=400.0)).config.data
    assert few.fraction * 400 >= 100
    assert few.next_sentence == "nsp"


@pytest.mark.parametrize("megabytes", [0.3, 1, 10, 100])
def test_planned_network_is_not_too_large_even_for_half_of_the_estimated_tokens(megabytes: float) -> None:
    text = english(megabytes)
    for seconds in (120.0, 3600.0, 86_400.0):
        made = plan(text, seconds, flops=1e14)
        assert too_large(made.training.size.weights, made.config.data.fraction * text.tokens / 2) is None

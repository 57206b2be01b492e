"""The planner: a pure function from facts to a configuration with reasons."""

import re
from dataclasses import replace
from typing import Any

import pytest

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.plan import law
from bert_pretrain.plan.machine_facts import MASKED_SHARE, SIZES, MachineFacts, Size, Speed
from bert_pretrain.plan.planner import MIN_SECONDS, Plan, make_plan
from bert_pretrain.plan.text_facts import TextFacts
from bert_pretrain.report.use import MEASURED
from bert_pretrain.train.flops import training_flops

ENGLISH = TextFacts(
    num_bytes=100e6, documents=7000, sentences_per_document=100, single_sentence_share=0.0, cjk_share=0.0,
    is_divisible=True,
)  # fmt: skip


def machine(flops: float = 1e11, cores: int = 2) -> MachineFacts:
    speeds = [speed(size, flops, is_timed=size in SIZES[:2]) for size in SIZES]
    return MachineFacts(cores=cores, memory_bytes=32 << 30, speeds=speeds)


def speed(size: Size, flops: float, **more: Any) -> Speed:
    return Speed(layers=size.layers, hidden=size.hidden, flops_per_second=flops, update_seconds=0.0, **more)


def plan(text: TextFacts = ENGLISH, seconds: float = 600.0, flops: float = 1e11) -> Plan:
    return make_plan(("corpus.txt",), text, machine(flops), seconds)


def reason(made: Plan, key: str) -> str:
    return next(choice.reason for choice in made.choices if choice.key == key)


def test_the_same_facts_give_the_same_plan_and_every_choice_has_a_reason() -> None:
    made = plan()
    assert made == plan()
    assert all(choice.reason for choice in made.choices)
    assert len({choice.key for choice in made.choices}) == len(made.choices)
    assert made.config.inputs == ("corpus.txt",)
    assert made.config.time == 600.0
    assert made.config.phases == ()


def test_more_time_or_a_faster_machine_gives_a_network_that_is_no_smaller_and_expects_less_loss() -> None:
    plans = [plan(seconds=seconds) for seconds in (120, 600, 3600, 36_000, 360_000)]
    weights = [made.training.size.weights for made in plans]
    losses = [made.training.forecast.loss for made in plans]
    assert weights == sorted(weights)
    assert losses == sorted(losses, reverse=True)
    assert weights[-1] > weights[0]
    assert plan(flops=1e14).training.size.weights > plan(flops=1e11).training.size.weights


def test_a_plan_says_after_what_time_a_model_is_expected_to_beat_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEASURED, "en", ((4.5, 1.0), (4.3, 3.0)))
    short = plan(seconds=MIN_SECONDS, flops=1e10)
    assert not short.training.forecast.use.is_better
    assert short.better_after is not None
    assert short.better_after > MIN_SECONDS
    assert plan(seconds=short.better_after, flops=1e10).training.forecast.use.is_better
    assert plan(seconds=36_000.0).better_after == 36_000.0
    assert plan(replace(ENGLISH, num_bytes=2e5), flops=1e10).better_after is None


def test_the_chosen_network_has_the_lowest_loss_expected() -> None:
    made = plan(seconds=3600)
    assert made.training.tokens > 0
    for size in SIZES:
        tokens = made.training.tokens * made.training.size.flops_per_token(8192, 64) / size.flops_per_token(8192, 64)
        other = law.forecast(size, made.config.vocab.size, tokens, tokens / 24, is_chinese=False)
        assert made.training.forecast.loss <= other.loss * 1.001


def test_what_the_text_is_decides_pairs_language_and_held_out_share() -> None:
    assert plan().config.data.next_sentence == "nsp"
    lines = plan(replace(ENGLISH, single_sentence_share=0.9, sentences_per_document=1))
    assert lines.config.data.next_sentence == "none"
    assert "90%" in reason(lines, "data.next_sentence")
    assert plan(replace(ENGLISH, documents=2.0)).config.data.next_sentence == "sop"
    chinese = plan(replace(ENGLISH, cjk_share=0.9)).config
    assert chinese.data.language == "zh"
    assert plan().config.data.validation_fraction * ENGLISH.num_bytes * 0.24 >= 256 * 60


@pytest.mark.parametrize("num_bytes", [1e5, 2e6, 1e8])
@pytest.mark.parametrize(
    ("documents", "pairs"), [(1.0, "sop"), (9.0, "sop"), (10.0, "sop"), (20.0, "nsp"), (400.0, "nsp")]
)
def test_no_more_than_a_tenth_of_the_text_is_held_out(num_bytes: float, documents: float, pairs: str) -> None:
    made = plan(replace(ENGLISH, num_bytes=num_bytes, documents=documents))
    assert made.config.data.next_sentence == pairs
    assert made.config.data.validation_fraction <= 0.1
    if documents < 10:
        assert made.config.data.validation_fraction == 0.0
        assert "too much" in reason(made, "data.validation_fraction")
    else:
        assert round(made.config.data.validation_fraction * documents) >= (2 if pairs == "nsp" else 1)


def test_a_boundary_that_makes_more_documents_is_planned_with_its_reason() -> None:
    made = plan(replace(ENGLISH, boundary="blank_line", documents_as_configured=3.0))
    assert made.config.data.document_boundary == "blank_line"
    assert "would be 3" in reason(made, "data.document_boundary")
    assert plan().config.data.document_boundary == "auto"


def test_a_little_text_is_seen_no_more_often_than_was_measured_and_takes_no_more_time_than_that() -> None:
    little = replace(ENGLISH, num_bytes=1e6, documents=100)
    hour, day = (plan(little, seconds) for seconds in (3600.0, 86_400.0))
    assert day.training.epochs == hour.training.epochs == law.MAX_EPOCHS
    assert day.config.data.dupe_factor > plan(seconds=120).config.data.dupe_factor == 1
    assert day.seconds == pytest.approx(hour.seconds, rel=0.02)
    assert MIN_SECONDS <= day.seconds < 3600.0
    assert day.config.time == day.seconds
    assert "of 24h: enough to see the text 40 times" in day.why_seconds
    assert plan(seconds=3600.0).seconds == 3600.0
    assert plan(seconds=3600.0).why_seconds == ""


@pytest.mark.parametrize("num_bytes", [1e6, 5e6, 20e6, 100e6])
def test_a_fast_machine_takes_no_larger_network_than_the_text_allows(num_bytes: float) -> None:
    made = plan(replace(ENGLISH, num_bytes=num_bytes, documents=num_bytes / 1e4), 36_000.0, flops=1e14)
    assert made.training.size.weights <= law.MAX_WEIGHTS_PER_TOKEN * 0.24 * num_bytes
    why = reason(made, "model.num_hidden_layers")
    others = [float(loss) for loss in re.findall(r"L\d+-H\d+ ([\d.]+)", why)]
    assert all(loss >= round(made.training.forecast.loss, 2) for loss in others), why


def test_weights_decay_the_more_the_more_often_the_text_is_seen() -> None:
    epochs = (0.5, 2.0, 8.0, 25.0, 100.0)
    decays = [law.recipe(Size(2, 128), 2048, 64, each).weight_decay for each in epochs]
    assert decays == sorted(decays)
    assert 0.1 <= decays[0] < decays[-1]
    often = plan(replace(ENGLISH, num_bytes=1e6, documents=100), 3600.0)
    assert "seen 40 times" in reason(often, "train.weight_decay")


def test_what_lies_beyond_the_measured_runs_is_said() -> None:
    assert plan(seconds=120).training.forecast.beyond == ""
    days = plan(seconds=10 * 86400, flops=1e14)
    assert "million tokens" in days.training.forecast.beyond
    near, far = plan(seconds=120).training.forecast.mlm_loss, days.training.forecast.mlm_loss
    assert far[1] / far[0] > near[1] / near[0]


@pytest.mark.parametrize(
    ("text", "seconds", "message"),
    [
        (ENGLISH, 60.0, "too short"),
        (replace(ENGLISH, num_bytes=20e9, is_divisible=False), 600.0, "vocabulary and data of 20,000 MB"),
        (replace(ENGLISH, num_bytes=20e9, vocab_reads_all=True), 600.0, "read whole by vocab, as they are compressed"),
    ],
)
def test_too_little_time_is_one_message(text: TextFacts, seconds: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(text, seconds)


@pytest.mark.parametrize(
    ("num_bytes", "cjk_share", "size"),
    [
        (5e5, 0.0, 4096),
        (1.5e6, 0.0, 8192),
        (3e6, 0.0, 16_384),
        (5e6, 0.0, 30_522),
        (20e9, 0.0, 30_522),
        (98e6, 0.9, 8192),
        (5e9, 0.9, 21_128),
    ],
)
def test_the_vocabulary_grows_with_the_text(num_bytes: float, cjk_share: float, size: int) -> None:
    text = replace(ENGLISH, num_bytes=num_bytes, documents=num_bytes / 1e4, cjk_share=cjk_share)
    assert plan(text, 86_400, flops=1e14).config.vocab.size == size


def test_long_trainings_end_with_long_examples() -> None:
    assert plan().config.phases == ()
    short, long = (made.for_phase(phase) for made in [plan(seconds=100_000).config] for phase in made.phases)
    assert (short.data.max_seq_length, long.data.max_seq_length) == (128, 512)
    assert long.train.global_batch_size * 4 == short.train.global_batch_size
    assert long.train.peak_lr < short.train.peak_lr


def test_of_a_large_corpus_a_fraction_is_read() -> None:
    for num_bytes in (1e9, 1e12):
        made = plan(replace(ENGLISH, num_bytes=num_bytes, documents=num_bytes / 1e4), 600.0)
        read = made.config.data.fraction * num_bytes
        assert 10e6 <= read < 0.4 * 600 * 2 * 2.5e6
        assert made.training.epochs < 1.0
    assert plan(seconds=36_000).config.data.fraction == 1.0
    large = replace(ENGLISH, num_bytes=2e9, documents=2e5)
    plain, packed = (plan(replace(large, vocab_reads_all=reads_all), 600.0, flops=1e13) for reads_all in (False, True))
    assert packed.config.data.fraction < plain.config.data.fraction
    few = plan(replace(ENGLISH, num_bytes=1e9, documents=400.0), 600.0)
    assert few.config.data.fraction * 400 >= 100
    assert few.config.data.next_sentence == "nsp"
    whole = plan(replace(ENGLISH, is_divisible=False))
    assert whole.config.data.fraction == 1.0


def test_plans_predict_more_tokens_than_the_paper_and_their_networks_are_timed_so() -> None:
    made = plan()
    assert made.config.data.masked_lm_prob == MASKED_SHARE > Config().data.masked_lm_prob
    assert "15 %" in reason(made, "data.masked_lm_prob")
    size = made.training.size
    few = training_flops(size.model_config(128), 8192, 1.0, 128, Config().data.masked_lm_prob)
    assert size.flops_per_token(8192, 128) > few


def test_a_learning_rate_falls_with_the_width() -> None:
    rates = [law.recipe(size, 2048, 64, 1.0).peak_lr for size in (Size(2, 128), Size(4, 512), Size(12, 768))]
    assert rates == sorted(rates, reverse=True)


def test_a_batch_grows_with_what_launching_a_step_costs_and_with_the_tokens() -> None:
    worth = [law.batch_worth(batch, 10.0) for batch in law.BATCHES]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] == 1.0
    assert law.batch_worth(65_536, 100.0) > law.batch_worth(65_536, 1.0)

    def batch(launch_seconds: float, seconds: float = 600.0) -> int:
        speeds = [speed(size, 1e13, launch_seconds=launch_seconds) for size in SIZES]
        facts = MachineFacts(device="cuda", cores=2, memory_bytes=32 << 30, speeds=speeds)
        made = make_plan(("corpus.txt",), ENGLISH, facts, seconds).config
        return made.train.global_batch_size * made.data.max_seq_length

    assert batch(0.0) <= batch(0.02) < batch(0.2)


def test_networks_that_do_not_fit_into_memory_are_not_planned() -> None:
    facts = MachineFacts(cores=2, memory_bytes=4 << 30, speeds=[speed(size, 1e15) for size in SIZES])
    assert Size(12, 768) in facts.sizes
    assert Size(24, 1024) not in facts.sizes


def test_repeated_text_is_worth_less_than_new_text() -> None:
    new = law.forecast(Size(2, 128), 8192, 10.0, 1.0, is_chinese=False)
    seen = law.forecast(Size(2, 128), 8192, 10.0, 20.0, is_chinese=False)
    assert seen.loss > new.loss


@pytest.mark.parametrize("num_bytes", [1e5, 3e6, 1e8, 5e8])
@pytest.mark.parametrize("seconds", [700.0, 3600.0, 86400.0])
@pytest.mark.parametrize("cjk_share", [0.0, 0.95])
def test_plans_are_valid_configurations_for_any_text_and_time(
    num_bytes: float, seconds: float, cjk_share: float
) -> None:
    text = replace(ENGLISH, num_bytes=num_bytes, documents=max(2.0, num_bytes / 1e4), cjk_share=cjk_share)
    config = plan(text, seconds).config
    assert isinstance(config, Config)
    assert config.vocab.size >= 4096
    lengths = [config.for_phase(phase).data.max_seq_length for phase in config.phases] or [config.data.max_seq_length]
    assert config.model.max_position_embeddings == max(lengths)

"""The configuration from YAML, `--set` and flags: values, layers, presets, and the place of mistakes."""

import json
import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import write_reference
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.config import LENGTHS, Config, PhaseConfig
from bert_pretrain.config_file import load_config, preset_paths
from bert_pretrain.config_keys import as_commented_yaml, dump_yaml, key_schemas
from bert_pretrain.errors import ConfigError
from bert_pretrain.model.bert import BertForPreTraining

PAPER_PRESETS = json.loads((Path(__file__).parent / "golden" / "paper_presets.json").read_text(encoding="utf-8"))


def from_yaml(folder: Path, text: str, **options: object) -> Config:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, **options)  # type: ignore[arg-type]


MEANINGS = [
    ("train.peak_lr", "1e-4", 1e-4),
    ("train.max_steps", "1_000", 1000),
    ("train.max_steps", "null", None),
    ("train.time_budget", "24h", 86400.0),
    ("train.time_budget", "1d 2h", 93600.0),
    ("train.time_budget", "90 min", 5400.0),
    ("train.time_budget", "2.5e-1s", 0.25),
    ("data.language", "no", "no"),
    ("data.text_field", "1", "1"),
    ("data.text_field", "'null'", "null"),
    ("data.whole_word_mask", "no", False),
    ("data.whole_word_mask", "yes", True),
    ("vocab.strip_accents", "no", False),
    ("train.betas", "[0.9, 0.98]", (0.9, 0.98)),
    ("train.micro_batch_tokens", "8192", 8192),
    ("train.device", "cuda:1", "cuda:1"),
    ("data.max_record_bytes", "1G", 10**9),
]


@pytest.mark.parametrize(("key", "text", "value"), MEANINGS)
def test_value_is_parsed_the_same_in_file_and_set(tmp_path: Path, key: str, text: str, value: object) -> None:
    section, name = key.split(".")
    assert attrgetter(key)(from_yaml(tmp_path, f"{section}:\n  {name}: {text}\n")) == value
    assert attrgetter(key)(load_config(settings=[f"{key}={text}"])) == value


@pytest.mark.parametrize("text", ["", "# nothing\n", "train: {}\nphases:\ninputs:\n", "train: null\n"])
def test_empty_files_and_sections_give_defaults(tmp_path: Path, text: str) -> None:
    assert from_yaml(tmp_path, text) == Config()
    assert from_yaml(tmp_path, "train:\n", settings=["train.seed=7"]).train.seed == 7


def test_phases_override_data_and_training(tmp_path: Path) -> None:
    text = """
data: {max_seq_length: 64, dupe_factor: 3, seed: &seed 9}
train: {peak_lr: 3e-4, seed: *seed}
phases:
  - {name: short, data: , train: {max_steps: 90}}
  - {name: long, data: {max_seq_length: 512}, train: {max_steps: 10, peak_lr: 1e-4}}
"""
    config = from_yaml(tmp_path, text)
    short, long = (config.for_phase(phase) for phase in config.phases)
    assert (short.data.max_seq_length, short.train.max_steps, short.train.peak_lr) == (64, 90, 3e-4)
    assert (long.data.max_seq_length, long.train.max_steps, long.train.peak_lr) == (512, 10, 1e-4)
    assert short.data.dupe_factor == long.data.dupe_factor == 3
    assert short.data.seed == long.train.seed == 9
    assert not long.phases


ALIAS_BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
MISTAKES = [
    ("train:\n  peak_lrr: 1\n", 2, "peak_lr, warmup_ratio"),
    ("train:\n  peak_lr: fast\n", 2, "train.peak_lr is 'fast'"),
    ("train:\n  peak_lr: inf\n", 2, "a number greater than 0"),
    ("train:\n  peak_lr:\n", 2, "empty"),
    ("train:\n  max_steps: 0\n", 2, "whole number greater than 0, or null"),
    ("data:\n  masked_lm_prob: 1.5\n", 2, "greater than 0 and less than 1"),
    ("data:\n  whole_word_mask: maybe\n", 2, "'maybe'"),
    ("data:\n  next_sentence: roberta\n", 2, "nsp, sop or none"),
    ("data:\n  word_segmenter: jieba\n", 2, "whole_word_mask"),
    ("data:\n  encoding: gb18031\n", 2, "gb18030"),
    ("data:\n  max_record_bytes: 1M\n", 2, "4,194,304"),
    ("train:\n  max_steps: 5\n  max_epochs: 2\n", "2 and {}:3", "max_steps 5 and max_epochs 2"),
    ("train:\n  max_steps: 3\n  schedule_steps: 9\n  warmup_steps: 10\n", 4, "9 steps"),
    ("train:\n  time_budget: 2h\n  warmup_steps: 0\n", 3, "train.warmup_ratio"),
    ("time: 2h\ntrain:\n  warmup_steps: 10\n", 3, "train.warmup_ratio"),
    ("train: {max_steps: 4}\nphases:\n  - name: a\n  - name: b\n    train:\n      warmup_steps: 9\n", 6, "8 steps"),
    ("train:\n  time_budget: soon\n", 2, "1h30m"),
    ("train:\n  betas: [0.9]\n", 2, "[0.9, 0.98]"),
    ("data: {seed: 1}\ndata: {seed: 2}\n", 2, "twice"),
    ("data:\n\tseed: 5\n", 2, "YAML"),
    ("- data\n", None, "mapping"),
    ("data: &a {seed: *a}\n", None, "contains itself"),
    ("data: " + "[" * 10_000, None, "nested"),
    ("data: {seed: 1}\ninputs: !!python/object/apply:os.system [a.txt]\n", 2, "os.system"),
    (ALIAS_BOMB, 1, "100,000 values"),
    ('data: {language: "\\ud800"}', None, "surrogates"),
    ("phases:\n  - name: a\n    train: {peek_lr: 1}\n", 3, "peak_lr, warmup_ratio"),
    ("phases:\n  - train: {seed: 1}\n", 2, "'phases.0.name' is missing"),
    ("phases:\n  - {name: a, model: {hidden_size: 5}}\n", 2, "phases.0.model"),
    ("phases: [{name: a}, {name: a}]\n", 1, "share a name"),
    ("phases: [{name: a/b}]\n", 1, "phases.0.name is 'a/b'"),
]


@pytest.mark.parametrize(("text", "line", "part"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistake_names_value_line_and_remedy(tmp_path: Path, text: str, line: object, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml(tmp_path, text)
    path = str(tmp_path / "config.yaml")
    assert caught.value.where == (path if line is None else f"{path}:{line}".format(path))
    assert caught.value.remedy
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("=3", "section.key=value"),
        ("train.peak_lr=x", "--set train.peak_lr"),
        ("train.peak_lr.deep=3", "--set train.peak_lr.deep"),
        ("train.betas=[0.9", "--set train.betas"),
        ("inputs=a.txt", "[a.txt, "),
        ("train.trackers=wandb", "[tensorboard, wandb]"),
        ("data.input_weights={a.txt: 0}", "{a.txt: 3}"),
        ("data.text_field=", "subject,body"),
        ("phases=7", "[{name: first"),
        ("model.hidden_size=100", "num_attention_heads"),
        ("extends=tiny", "unknown key 'extends'\n"),
    ],
)
def test_mistake_in_set_names_the_flag(setting: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings=["train.betas=[0.9, 0.99]", "train.peak_lr=1", setting])
    assert part in str(caught.value)
    assert caught.value.where.startswith("--set")


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
FLOATS = st.floats(min_value=1e-12, max_value=0.999, exclude_min=True)
FIELDS = WORDS.map(lambda word: word.replace(",", ";"))
LANGUAGES = WORDS.map(lambda word: word * 2) | st.sampled_from(["no", "null", "~~", "1e-4", "0x10", "yes", "12:30:45"])
TRAIN = {
    "peak_lr": FLOATS,
    "eps": FLOATS,
    "betas": st.tuples(FLOATS, FLOATS),
    "max_epochs": st.none() | FLOATS,
    "seed": st.integers(-(2**70), 2**70),
}
OVERRIDES = st.just({}) | st.fixed_dictionaries({"seed": st.just("5"), "text_field": FIELDS})
CONFIGS = st.fixed_dictionaries(
    {
        "inputs": st.lists(WORDS, max_size=3),
        "vocab": st.fixed_dictionaries({"strip_accents": st.none() | st.booleans()}),
        "data": st.fixed_dictionaries({"language": LANGUAGES | st.just("<<"), "text_field": FIELDS}),
        "train": st.fixed_dictionaries(TRAIN),
        "phases": OVERRIDES.map(lambda data: [{"name": "p1", "data": data}]),
    }
).map(Config.model_validate)


@given(config=CONFIGS)
def test_dumped_configuration_round_trips(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    loaded = from_yaml(tmp_path_factory.getbasetemp(), dump_yaml(config))
    assert loaded == config
    assert loaded.for_phase(loaded.phases[0]) == config.for_phase(config.phases[0])


@pytest.mark.parametrize("names", [None, *preset_paths(), "small,paper"])
def test_commented_configuration_round_trips_and_describes_every_key(names: str | None, tmp_path: Path) -> None:
    config = load_config(names)
    text = as_commented_yaml(config)
    again = from_yaml(tmp_path, text)
    assert again.model_dump(exclude={"phases"}) == config.model_dump(exclude={"phases"})
    assert list(map(again.for_phase, again.phases)) == list(map(config.for_phase, config.phases))
    assert all(f"{key.rpartition('.')[2]}:" in text for key in key_schemas() if not key.startswith("phases."))
    assert all(re.fullmatch(r"[A-Z`].*\.", schema["description"]) for schema in key_schemas().values())
    assert names is None or "," in names or config == load_config(preset_paths()[names])


@pytest.mark.parametrize(("seconds", "text"), [(5400.0, "1h30m"), (90061.0, "25h1m1s"), (2.5, "2.5s")])
def test_duration_is_written_with_units_and_round_trips(seconds: float, text: str, tmp_path: Path) -> None:
    written = dump_yaml(load_config(settings=[f"time={seconds}"]))
    assert yaml.safe_load(written)["time"] == text
    assert from_yaml(tmp_path, written).time == seconds


@pytest.mark.parametrize("path", write_reference.FILES, ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path: Path) -> None:
    """Update them with: python scripts/write_reference.py."""
    assert path.read_text(encoding="utf-8") == write_reference.FILES[path]()


def test_warm_up_that_may_fit_is_accepted() -> None:
    phases = "phases=[{name: a, train: {max_steps: 40}}, {name: b, train: {max_steps: 60}}]"
    for settings in (
        ["train.warmup_steps=9", "train.max_steps=5", "train.schedule_steps=9"],
        ["train.warmup_steps=9", "train.max_epochs=1"],  # the number of steps depends on the data
        ["train.warmup_ratio=1", "train.time_budget=60"],
        ["train.warmup_steps=100", phases],
    ):
        assert load_config(None, settings)
    with pytest.raises(ConfigError, match="40 steps"):
        load_config(None, [*settings, "train.max_steps=40"], with_phases=False)


@pytest.mark.parametrize("names", PAPER_PRESETS)
def test_recipe_of_the_paper_is_unchanged(names: str) -> None:
    config = load_config(names)
    assert config.model_dump(mode="json", exclude_defaults=True) == PAPER_PRESETS[names]
    steps = sum(config.for_phase(phase).train.max_steps or 0 for phase in config.phases)
    assert steps * config.train.warmup_ratio == 10_000
    for length in ("train.time_budget=3m", "train.max_steps=1000"):
        config = load_config(names, [length], with_phases=False)
        assert (config.train.warmup_steps, config.train.warmup_ratio) == (None, 0.01)


def test_keys_that_all_phases_override_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("base", ["train.max_steps=1000"])
    assert caught.value.where == "--set train.max_steps"
    assert load_config("base", ["train.max_steps=1000", "phases=[]"]).train.max_steps == 1000
    one_of_two = ["phases=[{name: a}, {name: b, train: {peak_lr: 1}}]", "train.peak_lr=2"]
    assert load_config(None, one_of_two).train.peak_lr == 2
    assert load_config("base", ["train.time_budget=24h"], with_phases=False).train.time_budget == 86400
    with pytest.raises(ConfigError, match="lengths of the run"):
        load_config("base", ["train.time_budget=24h"])


SIZES = {  # millions of parameters with the pooler, without the heads
    "tiny": 4.4, "mini": 11.2, "small": 28.8, "medium": 41.4, "base": 109.5, "classic": 109.5, "base-chinese": 102.3,
    "large": 335.1, "large-12gb": 335.1, "modern-tiny": 4.3, "modern-base": 133.8, "albert-base": 11.7,
    "electra-small": 13.5, "electra-tiny": 4.4,
}  # fmt: skip


def test_presets_have_the_published_sizes() -> None:
    assert preset_paths().keys() - SIZES.keys() == {"demo", "paper", "short"}
    for name, millions in SIZES.items():
        config = load_config(name)
        with torch.device("meta"):
            model = BertForPreTraining(config.model, config.vocab.size)
        heads = sum(p.numel() for part in (model.mlm_head, model.nsp_head) if part for p in part.parameters())
        assert round((model.num_parameters - heads) / 1e6, 1) == millions, name


UNDER = """inputs: [a.txt]
data: {seed: 1, dupe_factor: 2}
train:
  peak_lr: 1e-3
  max_epochs: 3
phases:
  - {name: only, train: {seed: 5}}
"""
OVER = "extends: under.yaml\ndata: {seed: 2}\ntrain:\n  max_steps: 7\n"


def layers(folder: Path, **texts: str) -> str:
    """Write YAML files next to under.yaml and over.yaml, and return their paths joined by commas."""
    for name, text in {"under": UNDER, "over": OVER, **texts}.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return ",".join(str(folder / f"{name}.yaml") for name in texts)


def test_later_layers_win_per_key_and_replace_phases(tmp_path: Path) -> None:
    source = layers(tmp_path, under=UNDER, last="data: {dupe_factor: 9}\ntrain:\nphases: [{name: new}]\n")
    config = load_config(source)
    assert (config.inputs, config.data.seed, config.data.dupe_factor, config.train.peak_lr) == (("a.txt",), 1, 9, 1e-3)
    assert config.phases == (PhaseConfig(name="new"),)
    flags = {"vocab.size": ("--vocab-size", 9000), "data.seed": ("--seed", 3)}
    config = load_config(source, ["data.dupe_factor=4", "data.seed=1", "data.seed=2"], flags)
    assert (config.data.dupe_factor, config.data.seed, config.vocab.size) == (4, 3, 9000)
    two = "extends: tiny\nphases: [{name: a, train: {max_steps: 8}}, {name: b, train: {max_steps: 2}}]\n"
    config = load_config(layers(tmp_path, top=two))
    assert [config.for_phase(phase).train.max_steps for phase in config.phases] == [8, 2]


def test_extends_presets_and_files(tmp_path: Path) -> None:
    config = load_config(layers(tmp_path, top="extends: small,over.yaml\ntrain: {peak_lr: 5e-3}\n"))
    assert (config.model.hidden_size, config.data.seed, config.data.dupe_factor) == (512, 2, 2)
    assert (config.train.peak_lr, config.train.max_steps, config.train.max_epochs) == (5e-3, 7, None)
    assert load_config(layers(tmp_path, top="extends: small,paper\n")) == load_config("small,paper")


def test_length_in_later_layer_replaces_other_length_key(tmp_path: Path) -> None:
    for settings, length in (
        ([], {"max_steps": 7}),
        (["train.time_budget=1h"], {"time_budget": 3600.0}),
        (["train={max_epochs: 2}"], {"max_epochs": 2.0}),
    ):
        train = load_config(layers(tmp_path, over=OVER), settings).train
        assert {key: value for key in LENGTHS if (value := getattr(train, key)) is not None} == length


@pytest.mark.parametrize(
    ("texts", "where", "part"),
    [
        ({"a": "train:\n  seed: 1\n", "b": "train:\n\n  seed: x\n"}, "b.yaml:3", "train.seed"),
        ({"a": "extends: over.yaml\ntrain:\n  sed: 1\n"}, "a.yaml:3", "'train.sed'"),
        ({"a": "\nextend: base\n"}, "a.yaml:2", "'extend'"),
        ({"a": "\nextends: bse\n"}, "a.yaml:2", "base, "),
        ({"a": "extends: base,sub/no.yaml\n"}, "a.yaml:1", "sub/no.yaml"),
        ({"a": "extends: b.yaml\n", "b": "data:\nextends: a.yaml\n"}, "b.yaml:2", "extends itself"),
        (
            {"a": "model: {hidden_size: 100}\n", "b": "model:\n  num_attention_heads: 3\n"},
            "a.yaml:1 and {}/b.yaml:2",
            "hidden_size 100",
        ),
        ({"a": "extends: base\ntrain:\n  max_steps: 1000\n"}, "a.yaml:3", "phases=[]"),
    ],
)
def test_mistake_in_layers_names_file_and_line(tmp_path: Path, texts, where: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(layers(tmp_path, **texts))
    assert caught.value.where == f"{tmp_path}/{where.format(tmp_path)}"
    assert part in str(caught.value)

"""The configuration: one YAML with a section a stage, checked once, here; everything inside trusts it.

Input: a preset's name or a path, `--set section.key=value` pairs and flags. Output: a frozen `Config`. YAML scalars are
taken as text and given their meaning by the field they belong to, so `1e-4` is a number where a number is expected,
`no` is false where a truth value is and Norwegian where a language is.
"""

import contextlib
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from bert_pretrain.errors import ConfigError
from bert_pretrain.yaml_text import KeyPath, parse_value, parse_yaml


def _whole_number(value: object) -> object:
    """Accept `1e5` and `30_522` where a whole number is expected."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)  # before float, which rounds above 2**53
        try:
            number = float(value)
        except ValueError:
            return value
        if number.is_integer():
            return int(number)
    return value


def _seconds(value: object) -> object:
    """Accept `24h`, `1h30m`, `45s` where a duration is expected; a bare number is seconds."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*" + r"".join(rf"(?:([\d.]+)\s*{unit}\s*)?" for unit in "dhms"), value)
        if found and any(found.groups()):
            with contextlib.suppress(ValueError):
                sizes = (86400, 3600, 60, 1)
                return sum(float(part) * size for part, size in zip(found.groups(), sizes, strict=True) if part)
    return value


Int = Annotated[int, BeforeValidator(_whole_number)]
PositiveInt = Annotated[Int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0.0), BeforeValidator(_seconds)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


class VocabConfig(_Section):
    """Stage 1: the WordPiece vocabulary."""

    size: Annotated[Int, Field(ge=6)] = 30522
    """Tokens in the vocabulary, special and unused ones included; never exceeded."""
    lowercase: bool = True
    strip_accents: bool | None = None
    """null follows `lowercase`, as BERT does."""
    handle_chinese_chars: bool = True
    """Make every CJK character a word of its own."""
    min_frequency: PositiveInt = 2
    """Occurrences that a token needs."""
    limit_alphabet: PositiveInt | None = None
    """Characters kept; null keeps the most frequent ones up to a coverage of 99.99 %."""
    unused_tokens: Annotated[Int, Field(ge=0)] = 99
    """Free slots between [PAD] and [UNK]; 99 gives BERT's own special ids."""
    add_tokens: PositiveInt | None = None
    """With `vocab --extend`: tokens to add, into unused slots first, then at the end; null means as many as slots."""
    seed: Int = 12345
    """Chooses the documents held out to measure the vocabulary."""


class DataConfig(_Section):
    """How raw text is read, and stage 2: sentence pairs (Devlin et al., 2018, section 3.1 and appendix A.1)."""

    max_seq_length: Annotated[Int, Field(ge=8, le=65535)] = 128
    dupe_factor: PositiveInt = 5
    """Copies of the corpus, each with its own pairs and masks."""
    short_seq_prob: Probability = 0.1
    """The share of shorter pairs; without pairs (`next_sentence: none`) it has no meaning."""
    masked_lm_prob: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    max_predictions_per_seq: PositiveInt | None = None
    """null means masked_lm_prob * max_seq_length, rounded up."""
    whole_word_mask: bool = False
    word_segmenter: Literal["jieba"] | None = None
    """Tells which CJK characters form a word; null masks them one by one."""
    next_sentence: Literal["nsp", "sop", "none"] = "nsp"
    """B from another document or not (BERT), A and B in order or swapped (ALBERT), or full sentences and no pairs
    (RoBERTa)."""
    masking: Literal["static", "dynamic"] = "static"
    """Masks stored in the shards, or drawn anew in every epoch of training."""
    sentence_splitter: Literal["auto", "lines", "sentencex"] = "auto"
    """One sentence a line, or running text that `sentencex` cuts; auto looks at the text of each input."""
    language: Annotated[str, Field(min_length=2)] = "en"
    """An ISO 639 code, for splitting sentences and for the model card."""
    document_boundary: Literal["auto", "blank_line", "file"] = "auto"
    """What ends a document of a text file; auto: blank lines where it has one sentence a line, else its end."""
    text_field: Annotated[str, Field(min_length=1)] = "text"
    """The field of a JSONL record, or the column of a table, that holds the text."""
    strict: bool = False
    """Refuse text that is not valid UTF-8 instead of replacing and counting it."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    validation: tuple[str, ...] = ()
    """Inputs of an own validation split, instead of `validation_fraction`."""
    input_weights: dict[str, Annotated[float, Field(gt=0.0)]] = {}
    """INPUT -> how many times as often as others it is seen, 1 where not named."""
    drop_duplicates: bool = True
    """Leave out documents that equal another one token by token; those for validation stay."""
    examples_per_shard: Annotated[Int, Field(ge=64)] = 16384
    seed: Int = 12345
    """Of pairs, masks, order and the choice of what is held out."""

    @model_validator(mode="after")
    def _segments_for_masking(self) -> "DataConfig":
        if self.word_segmenter and not self.whole_word_mask:
            raise ValueError(f"word_segmenter {self.word_segmenter} needs whole_word_mask: true")
        return self


class ModelConfig(_Section):
    """The network, by the names of Hugging Face's `BertConfig`; `vocab_size` comes from the tokenizer."""

    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    hidden_act: Literal["gelu"] = "gelu"
    hidden_dropout_prob: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    attention_probs_dropout_prob: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    max_position_embeddings: PositiveInt = 512
    type_vocab_size: Annotated[Int, Field(ge=2)] = 2
    initializer_range: Annotated[float, Field(gt=0.0)] = 0.02
    layer_norm_eps: Annotated[float, Field(gt=0.0)] = 1e-12

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "ModelConfig":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        return self


class TrainConfig(_Section):
    """Stage 3: the optimisation (Devlin et al., 2018, appendix A.2)."""

    global_batch_size: PositiveInt = 256
    """Examples an optimizer step, over all micro-batches."""
    micro_batch_tokens: PositiveInt | Literal["auto"] = "auto"
    """Real tokens computed at once; changes speed and memory, not the result."""
    max_steps: PositiveInt | None = None
    """null means 100,000, unless `max_epochs` or `time_budget` is given."""
    max_epochs: Annotated[float, Field(gt=0.0)] | None = None
    time_budget: Seconds | None = None
    """Wall-clock time of training, evaluations and checkpoints included, such as 24h or 1h30m."""
    optimizer: Literal["adamw", "lamb", "muon"] = "adamw"
    """`muon` is for the matrices of the encoder's layers; the rest keeps AdamW."""
    bias_correction: bool = True
    """Of the moments in AdamW and LAMB; the paper's own code has none."""
    peak_lr: Annotated[float, Field(gt=0.0)] = 1e-4
    warmup_ratio: Probability = 0.01
    warmup_steps: Annotated[Int, Field(ge=0)] | None = None
    """Overrides `warmup_ratio`; clipped to the number of steps."""
    schedule: Literal["linear", "cosine", "wsd"] = "linear"
    schedule_steps: PositiveInt | None = None
    """Steps that the schedule spans where phases share one; null means the run's own."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (
        0.9,
        0.999,
    )
    eps: Annotated[float, Field(gt=0.0)] = 1e-6
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    attention: Literal["auto", "varlen", "padded"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    """By torch.compile; auto: on CUDA, where attention is varlen."""
    activation_checkpointing: bool = False
    """Compute a layer's activations again in its backward pass instead of keeping them: a third more work, far less
    memory."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """How several processes share the model: a copy each, or its rows dealt out where it does not fit."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """auto: CUDA where there is some; `cuda` without a number: that of the process."""
    log_every: PositiveInt = 10
    """Steps between lines of the log and of `metrics.jsonl`."""
    eval_every: PositiveInt = 1000
    """Steps between evaluations on what is held out."""
    save_every: PositiveInt = 1000
    """Steps between checkpoints: what a power cut can cost."""
    keep_checkpoints: PositiveInt = 3
    """The newest so many stay."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    seed: Int = 12345
    """Of first weights, dropout and the order of examples."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        lengths = {"max_steps": self.max_steps, "max_epochs": self.max_epochs, "time_budget": self.time_budget}
        given = [f"{name} {value:g}" for name, value in lengths.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are all lengths of the run; keep one")
        return self


# A section of overrides left empty in YAML (`data:`) is null there.
Overrides = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


class PhaseConfig(_Section):
    """One phase of training: what it changes in the sections `data` and `train`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    data: Overrides = {}
    train: Overrides = {}


class Config(_Section):
    """The whole configuration of `bert-pretrain`."""

    inputs: tuple[str, ...] = ()
    vocab: VocabConfig = VocabConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    phases: tuple[PhaseConfig, ...] = ()

    def for_phase(self, phase: PhaseConfig) -> "Config":
        """Return this configuration with the phase's overrides applied and no phases."""
        tree = self.model_dump(mode="json", exclude={"phases"}, exclude_unset=True)
        for section in ("data", "train"):
            tree[section] = {**tree.get(section, {}), **getattr(phase, section)}
        return Config.model_validate(tree)


def load_config(
    source: str | Path | None = None,
    settings: Sequence[str] = (),
    flags: Mapping[str, tuple[str, object]] | None = None,
    *,
    with_phases: bool = True,
) -> Config:
    """Build the configuration from defaults, a preset or file, `--set` pairs and flags, later ones winning.

    Args:
        source: a path to a YAML file, or the name of a shipped preset.
        settings: `section.key=value` texts.
        flags: dotted key -> (the flag's name for messages, its value); a value of None counts as not given.
        with_phases: whether phases will be run; else they may contradict the rest, for example in the run's length.

    Raises:
        ConfigError: for an unknown preset, unknown keys, wrong values, or texts that are not YAML.
    """
    tree: dict[str, Any] = {}
    places: dict[KeyPath, str] = {}
    if source is not None:
        path = find_config(source)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the configuration: {error}", where=str(path), remedy="give a readable YAML file"
            ) from error
        tree, places = parse_yaml(text, str(path))
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"'{setting}' is not of the form section.key=value",
                where="--set",
                remedy="write for example --set train.peak_lr=2e-4",
            )
        _assign(tree, places, key, parse_value(value, f"--set {key}"), f"--set {key}")
    for key, (flag, given) in (flags or {}).items():
        if given is not None:
            _assign(tree, places, key, given, flag)
    return _validated(tree, places, with_phases)


def find_config(source: str | Path) -> Path:
    """Return the file behind a path or a preset's name."""
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.parent != Path("."):
        if not path.is_file():
            raise ConfigError(
                f"there is no configuration file '{path}'",
                where="--config",
                remedy="check the path, or name a preset: " + ", ".join(sorted(preset_paths())),
            )
        return path
    presets = preset_paths()
    if str(source) not in presets:
        raise ConfigError(
            f"there is no preset '{source}'{_nearest(str(source), presets)}",
            where="--config",
            remedy="name one of " + ", ".join(sorted(presets)) + ", or give the path of a .yaml file",
        )
    return presets[str(source)]


def preset_paths() -> dict[str, Path]:
    """Return the shipped presets: name -> file. In a checkout they lie in `configs/`, in a wheel beside this module."""
    here = Path(__file__).resolve().parent
    folder = next((path for path in (here / "configs", here.parent / "configs") if path.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def dump_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back to the same values."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _assign(tree: dict[str, Any], places: dict[KeyPath, str], dotted: str, value: object, where: str) -> None:
    """Put `value` at a dotted key, which replaces what an earlier source said there."""
    *parents, last = path = tuple(dotted.split("."))
    for depth, parent in enumerate(parents):
        if tree.get(parent) is None:  # a section left empty counts as one without keys
            tree[parent] = {}
        if not isinstance(tree[parent], dict):
            raise ConfigError(
                f"'{'.'.join(path[: depth + 1])}' holds no keys",
                where=where,
                remedy="name a key of a section, for example train.peak_lr",
            )
        tree = tree[parent]
    tree[last] = value
    for replaced in [place for place in places if place[: len(path)] == path]:
        del places[replaced]
    for depth in range(1, len(path) + 1):
        places.setdefault(path[:depth], where)


def _validated(tree: dict[str, Any], places: dict[KeyPath, str], with_phases: bool) -> Config:
    # A section left empty (`train:`) means its defaults.
    tree = {key: value for key, value in tree.items() if value is not None}
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, (), places) from error
    names = [phase.name for phase in config.phases]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two phases share a name: {', '.join(names)}",
            where=places.get(("phases",), "phases"),
            remedy="give each phase a name of its own",
        )
    if with_phases and config.phases:
        for index, phase in enumerate(config.phases):
            try:
                config.for_phase(phase)
            except ValidationError as error:
                raise _explain(error, ("phases", str(index)), places) from error
        _refuse_overruled(config.phases, places)
    return config


def _refuse_overruled(phases: Sequence[PhaseConfig], places: Mapping[KeyPath, str]) -> None:
    """Refuse a key of the command line that every phase sets otherwise, since it would change nothing."""
    for section in ("data", "train"):
        for key in set.intersection(*(set(getattr(phase, section)) for phase in phases)):
            if places.get((section, key), "").startswith("--"):
                raise ConfigError(
                    f"every phase sets {section}.{key} itself, so that this changes nothing",
                    where=places[section, key],
                    remedy="add --set 'phases=[]' to do without phases, or give phases of your own in a YAML file",
                )


def _explain(error: ValidationError, prefix: KeyPath, places: dict[KeyPath, str]) -> ConfigError:
    """Turn pydantic's first complaint into our three parts."""
    problem = error.errors()[0]
    # Pydantic adds the member of a union to the place; only what is in the configuration's own tree counts.
    location = tuple(str(part) for part in problem["loc"])
    path: KeyPath = prefix
    for part in location:
        if (*path, part) in places or problem["type"] == "extra_forbidden" or _is_key(path[len(prefix) :], part):
            path = (*path, part)
    dotted = ".".join(path)
    where = next((places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in places), "the configuration")
    if problem["type"] == "extra_forbidden":
        section = _section_at(path[len(prefix) : -1])
        keys = list(section.model_fields) if section else []
        return ConfigError(
            f"unknown key '{dotted}'{_nearest(path[-1], keys)}",
            where=where,
            remedy="the keys there are " + ", ".join(keys) if keys else "remove it",
        )
    message = problem["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if problem["type"] == "value_error":
        named = [places[key] for key in places if key[:-1] == path and key[-1] in message]
        where = " and ".join(dict.fromkeys(named)) or where
        return ConfigError(f"{dotted}: {message}", where=where, remedy="change one of the two")
    if problem["type"] == "missing":
        return ConfigError(f"'{dotted}' is missing", where=where, remedy="add it")
    is_union = len(path) - len(prefix) < len(location)
    remedy = _expectations(error, problem["loc"], is_union) if len(error.errors()) > 1 else message
    return ConfigError(f"{dotted} is {problem['input']!r}", where=where, remedy=f"give another value: {remedy}")


def _expectations(error: ValidationError, location: tuple[int | str, ...], is_union: bool) -> str:
    """Join what the members of a union expected at the same place."""
    parents = location[:-1]
    alike = [item for item in error.errors() if item["loc"][: len(parents)] == parents]
    # What a union's members expected stands below the key; beside it stand complaints about other keys.
    messages = [item["msg"] for item in alike if is_union or item["loc"] == location]
    return "; or ".join(dict.fromkeys(message[0].lower() + message[1:] for message in messages))


def _section_at(path: KeyPath) -> type[BaseModel] | None:
    section: Any = Config
    for part in path:
        if part.isdigit():
            continue
        field = section.model_fields.get(part)
        if field is None:
            return None
        section = PhaseConfig if part == "phases" else field.annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return None
    return section if isinstance(section, type) and issubclass(section, BaseModel) else None


def _is_key(path: KeyPath, part: str) -> bool:
    section = _section_at(path)
    return section is not None and part in section.model_fields


def _nearest(word: str, candidates: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""

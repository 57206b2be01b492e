"""The configuration: one YAML with a section for each stage, checked once, here; everything inside trusts it."""

import contextlib
import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from bert_pretrain.errors import ConfigError


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


def _count(value: object) -> object:
    """Accept `500k`, `1.5M`, `2G` and plain whole numbers where a count is expected."""
    if isinstance(value, str) and value.strip()[-1:] in UNITS:
        with contextlib.suppress(ValueError, OverflowError):  # 1e999M is infinite
            number = float(value.strip()[:-1]) * UNITS[value.strip()[-1]]
            return round(number) if math.isclose(number, round(number), rel_tol=1e-12) else value
    return _whole_number(value)


MIN_RECORD_BYTES, MAX_RECORD_BYTES = 4 << 20, 256 << 20
"""The lowest limit of a record, which is a block of text as it is read, and the default."""
UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}
DEFAULT_MAX_STEPS = 100_000
LENGTHS = ("max_steps", "max_epochs", "time_budget")
"""Keys of the section `train` that give the length of a run; it has one."""

Int = Annotated[int, BeforeValidator(_whole_number)]
PositiveInt = Annotated[Int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0.0), BeforeValidator(_seconds)]
Count = Annotated[int, Field(gt=0), BeforeValidator(_count)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class VocabConfig(_Section):
    """Stage 1: the vocabulary."""

    tokens: Literal["wordpiece", "words"] = "wordpiece"
    """Pieces of words, or whole words of text that is tokenized already: split at white space, otherwise as it is, so
    that `lowercase`, `strip_accents`, `handle_chinese_chars` and `limit_alphabet` are without effect."""
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
    max_record_bytes: Annotated[int, Field(ge=MIN_RECORD_BYTES), BeforeValidator(_count)] = MAX_RECORD_BYTES
    """A record is held in memory, so a larger one is refused: a line of JSONL, a row of CSV or Parquet."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    validation: tuple[str, ...] = ()
    """Inputs of your own validation split, instead of `validation_fraction`."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the text that is read: of more than 16 inputs that share of them, of fewer pieces of 8 MiB of each."""
    input_weights: dict[str, Annotated[float, Field(gt=0.0)]] = {}
    """INPUT -> how many times as often as others it is seen, 1 where not named."""
    drop_duplicates: bool = True
    """Leave out documents that equal another one token by token; those for validation stay."""
    near_duplicates: Annotated[float, Field(ge=0.5, le=1.0)] | None = None
    """Also leave out documents of which so large a share of all 5-token shingles, estimated, is shared with an earlier
    one (Jaccard similarity); needs the extra `near-duplicates`."""
    drop_repeated_lines: Annotated[Int, Field(ge=2)] | None = None
    """Leave out lines of 20 bytes or more that occur at least so often in the inputs, but for the first."""
    examples_per_shard: Annotated[Int, Field(ge=64)] = 16384
    seed: Int = 12345
    """Of pairs, masks, order and the choice of what is held out."""

    @model_validator(mode="after")
    def _segments_for_masking(self) -> "DataConfig":
        if self.word_segmenter and not self.whole_word_mask:
            raise ValueError(f"word_segmenter {self.word_segmenter} needs whole_word_mask: true")
        return self

    @model_validator(mode="after")
    def _duplicates_before_near_ones(self) -> "DataConfig":
        if self.near_duplicates is not None and not self.drop_duplicates:
            raise ValueError(f"near_duplicates {self.near_duplicates:g} needs drop_duplicates: true")
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
    """Overrides `warmup_ratio`; no more than the run has. A run by `time_budget` takes the ratio only."""
    init: Literal["normal", "positional_heads"] = "normal"
    """First weights: BERT's, or some with which the first layer begins by attending to neighbouring tokens."""
    mlm_bias: Literal["zeros", "unigram"] = "zeros"
    """First values of the output bias: 0, or the logarithm of how often each token occurs, so that training need not
    learn the frequencies first (Meister et al., 2023)."""
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
    """How several processes share the model: a copy each, or its rows sharded where it does not fit."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")] = "auto"
    """auto: CUDA where there is some, else the CPU; `cuda` without a number: that of the process; `mps`: Apple's GPU,
    untested."""
    log_every: PositiveInt = 10
    """Steps between lines of the log and of `metrics.jsonl`."""
    eval_every: PositiveInt = 1000
    """Steps between evaluations on what is held out."""
    save_every: PositiveInt = 1000
    """Steps between checkpoints: what a power cut can cost."""
    keep_checkpoints: PositiveInt = 3
    """The newest so many stay."""
    milestones: tuple[Count, ...] = ()
    """Words of training text, repetitions counted, after each of which the model is kept, such as [1M, 10M, 100M]."""
    probe: Annotated[str, Field(min_length=1)] | None = None
    """A small table with `text` and `label`, such as `finetune classify` reads; each evaluation says how well a linear
    classifier on the hidden states labels part of it."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    seed: Int = 12345
    """Of first weights, dropout and the order of examples."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        given = [f"{name} {value:g}" for name in LENGTHS if (value := getattr(self, name)) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are all lengths of the run; keep one")
        return self

    @property
    def planned_steps(self) -> int | None:
        """Steps of the run, where they do not depend on the data or the clock."""
        if self.max_epochs is not None or self.time_budget is not None:
            return None
        return self.max_steps or DEFAULT_MAX_STEPS

    def check_warmup(self, spanned_steps: int | None, where: str = "train.warmup_steps") -> None:
        """Refuse `warmup_steps` that do not fit.

        As many as there are fit: the rate then only rises, as with a `warmup_ratio` of 1.

        Args:
            spanned_steps: of the schedule; None where they are not known yet.
            where: what an error names.

        Raises:
            ConfigError: when there are more of them than the schedule spans, or the clock ends the run.
        """
        if self.warmup_steps is None:
            return
        ratio = (
            f"set train.warmup_steps=null and train.warmup_ratio (now {self.warmup_ratio:g}), which is a share of the"
        )
        if self.time_budget is not None:
            raise ConfigError(
                f"warmup_steps {self.warmup_steps:,} cannot be combined with time_budget {self.time_budget:g}: "
                "the number of steps is not known beforehand",
                where=where,
                remedy=f"{ratio} time",
            )
        if spanned_steps is not None and self.warmup_steps > spanned_steps:
            raise ConfigError(
                f"warmup_steps {self.warmup_steps:,} is longer than the run of {spanned_steps:,} steps",
                where=where,
                remedy=f"{ratio} run, or train for more steps",
            )


# A section of overrides left empty in YAML (`data:`) is null there.
Overrides = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


class PhaseConfig(_Section):
    """One phase of training: what it changes in the sections `data` and `train`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    data: Overrides = {}
    train: Overrides = {}
    time_share: Annotated[float, Field(gt=0.0)] = 1.0
    """With `time`: what the phase gets of the time for training, relative to the other phases."""


def _describe_extends(schema: dict[str, Any]) -> None:
    """Add the key of YAML files that `config_file` resolves before a configuration is built."""
    name = {"type": "string"}
    schema["properties"]["extends"] = {
        "anyOf": [name, {"type": "array", "items": name}],
        "description": "Presets or YAML files that this file is put over.",
    }


class Config(_Section):
    """The whole configuration of `bert-pretrain`."""

    model_config = ConfigDict(json_schema_extra=_describe_extends)

    inputs: tuple[str, ...] = ()
    time: Seconds | None = None
    """Wall-clock time of `run`, all stages included, such as 1h or 1h30m; training takes what is left of it, whatever
    length the section `train` gives."""
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

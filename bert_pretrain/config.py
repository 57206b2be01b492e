"""The configuration: one YAML with a section for each stage, checked once, here; everything inside trusts it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from bert_pretrain.config_values import (
    Count,
    Device,
    Encoding,
    Expects,
    Float,
    Int,
    Name,
    PositiveInt,
    Probability,
    Seconds,
    Share,
    TextField,
)
from bert_pretrain.errors import ConfigError

MIN_RECORD_BYTES, MAX_RECORD_BYTES = 4 << 20, 64 << 20
"""The lowest limit of a record, which is a block of text as it is read, and the default."""
DEFAULT_MAX_STEPS = 100_000
AUTO_LANGUAGE, SINGLE_CHARACTERS = "auto", "characters"
"""Values of `data.language` and `data.word_segmenter`."""
DEFAULT_EVAL_EVERY = 1000
LENGTHS = ("max_steps", "max_epochs", "time_budget")
"""Keys of the section `train` that give the length of a run; it has one."""
DURATIONS = (("time",), ("train", "time_budget"))
"""Keys whose values are durations."""

Boundary = Literal["auto", "blank_line", "line", "file"]


def _boundaries(value: object) -> object:
    """Accept `a.txt=line,b.txt=file` for a value for each input."""
    if not isinstance(value, str) or "=" not in value:
        return value
    return {name: boundary for name, _, boundary in (part.rpartition("=") for part in value.split(","))}


DocumentBoundary = Annotated[
    Boundary | dict[str, Boundary],
    BeforeValidator(_boundaries),
    Expects("auto, blank_line, line or file, or one for an input, such as a.txt=line"),
]
Inputs = Annotated[tuple[str, ...], Expects("a list in brackets, such as [a.txt, corpus/*.gz]")]


class _Section(BaseModel):
    # The texts below the keys are their descriptions: for `bert-pretrain config`, docs/keys.md and configs/schema.json.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class VocabConfig(_Section):
    """Stage 1: the vocabulary."""

    tokens: Literal["wordpiece", "words"] = "wordpiece"
    """Pieces of words, or whole words of text that is tokenized already: split at white space, otherwise as it is, so
    that `lowercase`, `strip_accents`, `handle_chinese_chars` and `limit_alphabet` are without effect."""
    size: Annotated[Int, Field(ge=6)] = 30522
    """Tokens in the vocabulary, special and unused ones included; never exceeded."""
    lowercase: bool = True
    """Lowercase the text before it is split."""
    strip_accents: bool | None = None
    """Remove accents; null follows `lowercase`, as BERT does."""
    handle_chinese_chars: bool = True
    """Make every CJK character a word of its own."""
    min_frequency: PositiveInt = 2
    """Least number of occurrences of a token."""
    limit_alphabet: PositiveInt | None = None
    """Characters kept; null keeps the most frequent ones up to a coverage of 99.99 %."""
    unused_tokens: Annotated[Int, Field(ge=0)] = 99
    """Unused slots between [PAD] and [UNK]; 99 gives BERT's own special ids."""
    add_tokens: PositiveInt | None = None
    """With `vocab --extend`: tokens to add, into unused slots first, then at the end; null means as many as slots."""
    seed: Int = 12345
    """Random seed of the choice of documents held out to measure the vocabulary."""


class DataConfig(_Section):
    """How raw text is read, and stage 2: sentence pairs (Devlin et al., 2018, section 3.1 and appendix A.1)."""

    max_seq_length: Annotated[Int, Field(ge=8, le=65535)] = 128
    """Tokens of an example at most, [CLS] and [SEP] included."""
    dupe_factor: PositiveInt = 5
    """Copies of the corpus, each with its own pairs and masks."""
    short_seq_prob: Probability = 0.1
    """Share of examples that are shorter on purpose; without pairs (`next_sentence: none`) it has no meaning."""
    masked_lm_prob: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """Share of the tokens that are predicted."""
    max_predictions_per_seq: PositiveInt | None = None
    """Most predicted tokens of an example; null means `masked_lm_prob` * `max_seq_length`, rounded up."""
    whole_word_mask: bool = False
    """Mask all pieces of a word together."""
    word_segmenter: Literal["jieba", "characters"] | None = None
    """What finds the words of Chinese for `whole_word_mask`; `characters` masks single ones; null: jieba where the text
    is Chinese."""
    next_sentence: Literal["nsp", "sop", "none"] = "nsp"
    """Task of pairs: nsp, B from another document or not (BERT); sop, A and B in order or swapped (ALBERT); none, full
    sentences and no pairs (RoBERTa)."""
    masking: Literal["static", "dynamic"] = "static"
    """Masks are stored in the shards (static), or drawn anew in every epoch of training (dynamic)."""
    sentence_splitter: Literal["auto", "lines", "sentencex"] = "auto"
    """One sentence per line, or running text that `sentencex` cuts; auto looks at the text of each input."""
    language: Annotated[str, Field(min_length=2), Expects("auto, or a language code such as en or zh")] = AUTO_LANGUAGE
    """An ISO 639 code, for splitting sentences and for the model card; auto: zh where the text is Chinese, else en."""
    document_boundary: DocumentBoundary = "auto"
    """What ends a document of a text file: a blank line, every line, or its end; auto: blank lines where it has one
    sentence per line, else its end; INPUT=line is for one input."""
    encoding: Encoding = "utf-8"
    """Encoding of text files, such as gb18030, big5 or cp1252; `auto` tells that of each file from its beginning."""
    text_field: TextField = "text"
    """Field of a JSON record, or column of a table, that holds the text; of several, [A, B], the texts of those that an
    input has are joined."""
    strict: bool = False
    """Refuse text that is not valid in its encoding instead of replacing and counting it."""
    max_record_bytes: Annotated[
        Count, Field(ge=MIN_RECORD_BYTES), Expects(f"a count such as 64M, at least {MIN_RECORD_BYTES:,}")
    ] = MAX_RECORD_BYTES
    """Largest record that is read: a line of JSONL, a row of CSV or Parquet, which is held in memory."""
    validation_fraction: Share = 0.01
    """Share of the documents held out for validation."""
    validation: Inputs = ()
    """Inputs of your own validation split, instead of `validation_fraction`."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the text that is read: of more than 16 inputs that share of them, of fewer pieces of 8 MiB of each."""
    input_weights: Annotated[dict[str, Float], Expects("numbers greater than 0 by input, such as {a.txt: 3}")] = {}
    """How many times as often as others an input is seen; 1 for inputs that are not named."""
    drop_duplicates: bool = True
    """Leave out documents that equal another one token by token; those for validation stay."""
    examples_per_shard: Annotated[Int, Field(ge=64)] = 16384
    """Examples in each Parquet file."""
    seed: Int = 12345
    """Random seed of pairs, masks, order and the choice of what is held out."""

    @model_validator(mode="after")
    def _segments_for_masking(self) -> "DataConfig":
        if self.word_segmenter and not self.whole_word_mask:
            raise ValueError(f"word_segmenter {self.word_segmenter} needs whole_word_mask: true")
        return self


class ModelConfig(_Section):
    """The network, by the names of Hugging Face's `BertConfig`; `vocab_size` comes from the tokenizer."""

    hidden_size: PositiveInt = 768
    """Width of the hidden states."""
    num_hidden_layers: PositiveInt = 12
    """Number of layers."""
    num_attention_heads: PositiveInt = 12
    """Attention heads of each layer; divides `hidden_size`."""
    intermediate_size: PositiveInt = 3072
    """Width of the feed-forward block."""
    hidden_act: Literal["gelu"] = "gelu"
    """Activation function, the exact GELU."""
    hidden_dropout_prob: Share = 0.1
    """Dropout of embeddings and of each block's output."""
    attention_probs_dropout_prob: Share = 0.1
    """Dropout of attention probabilities."""
    max_position_embeddings: PositiveInt = 512
    """Longest sequence that the model takes, in tokens."""
    type_vocab_size: Annotated[Int, Field(ge=2)] = 2
    """Number of segments: A and B."""
    initializer_range: Float = 0.02
    """Standard deviation of the first weights."""
    layer_norm_eps: Float = 1e-12
    """Added to the variance in layer normalisation."""

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
    """Examples per optimizer step, over all micro-batches and processes."""
    micro_batch_tokens: PositiveInt | Literal["auto"] = "auto"
    """Real tokens computed at once; changes speed and memory, not the result; auto: as many as fit."""
    max_steps: PositiveInt | None = None
    """Length of the run in steps; null means 100,000, unless `max_epochs` or `time_budget` is given."""
    max_epochs: Float | None = None
    """Passes over the training examples; fractions are allowed."""
    time_budget: Seconds | None = None
    """Wall-clock time of training, evaluations and checkpoints included, such as 24h or 1h30m."""
    optimizer: Literal["adamw", "lamb", "muon"] = "adamw"
    """`muon` is for the matrices of the encoder's layers; the rest keeps AdamW."""
    bias_correction: bool = True
    """Correct the bias of the moments in AdamW and LAMB; the paper's own code does not."""
    peak_lr: Float = 1e-4
    """Learning rate at the end of the warm-up."""
    warmup_ratio: Probability = 0.01
    """Share of the run in which the learning rate rises from 0 to `peak_lr`."""
    warmup_steps: Annotated[Int, Field(ge=0)] | None = None
    """Steps of warm-up, in place of `warmup_ratio`; not with `time_budget`, and no more than the run has."""
    init: Literal["normal", "positional_heads"] = "normal"
    """First weights: BERT's, or some with which the first layer begins by attending to neighbouring tokens."""
    mlm_bias: Literal["zeros", "unigram"] = "zeros"
    """First values of the output bias: 0, or the logarithm of how often each token occurs, so that training need not
    learn the frequencies first (Meister et al., 2023)."""
    teacher: Annotated[str, Field(min_length=1)] | None = None
    """A larger BERT's folder with the vocabulary of the data, from which first weights are taken where shapes allow
    (Sanh et al., 2019)."""
    schedule: Literal["linear", "cosine", "wsd"] = "linear"
    """Fall of the learning rate after the warm-up; wsd stays at `peak_lr` and falls in the last tenth."""
    schedule_steps: PositiveInt | None = None
    """Steps that the schedule spans where phases share one; null means the run's own."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    """Decoupled weight decay, of matrices only."""
    betas: tuple[Share, Share] = (
        0.9,
        0.999,
    )
    """Decay of the first and the second moment in AdamW and LAMB."""
    eps: Float = 1e-6
    """Added to the denominator of AdamW and LAMB."""
    max_grad_norm: Float = 1.0
    """Gradients with a larger norm are clipped to it."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of matrix products; auto: bf16 where the device has it, else fp16 on CUDA and fp32 on the CPU."""
    attention: Literal["auto", "varlen", "padded"] = "auto"
    """Sequences packed without padding (varlen) or padded; auto: varlen where the device supports it."""
    compile: bool | Literal["auto"] = "auto"
    """Use torch.compile; auto: on CUDA, where attention is varlen."""
    activation_checkpointing: bool = False
    """Compute a layer's activations again in its backward pass instead of keeping them: a third more work, far less
    memory."""
    device: Device = "auto"
    """Device that computes; auto: CUDA where there is some, else the CPU; `cuda` without a number: that of the process;
    `mps`: Apple's GPU, untested."""
    log_every: PositiveInt = 10
    """Steps between lines of the log and of `metrics.jsonl`."""
    eval_every: PositiveInt = DEFAULT_EVAL_EVERY
    """Steps between evaluations on what is held out; of a time budget also, by default, after every eighth."""
    eval_examples: PositiveInt | None = 10_000
    """Held-out examples of an evaluation, the same each time; the last one takes all, and null always."""
    save_every: PositiveInt = 1000
    """Steps between checkpoints: what a power cut can cost."""
    keep_checkpoints: PositiveInt = 3
    """How many of the newest checkpoints are kept."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides `metrics.jsonl`."""
    seed: Int = 12345
    """Random seed of first weights, dropout and the order of examples."""

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

    def check_warmup(
        self, spanned_steps: int | None, where: str = "train.warmup_steps", time: float | None = None
    ) -> None:
        """Refuse `warmup_steps` that do not fit into a schedule of `spanned_steps`, None where they are not known yet.

        `time` is that of all stages, where the clock ends the run.
        """
        clock = f"time {time:g}" if time is not None else ""
        clock = f"time_budget {self.time_budget:g}" if self.time_budget is not None else clock
        what = f"cannot be combined with {clock}: the number of steps is not known beforehand" if clock else ""
        if not clock and spanned_steps is not None and (self.warmup_steps or 0) > spanned_steps:
            what = f"is longer than the run of {spanned_steps:,} steps"
        if self.warmup_steps is not None and what:
            remedy = (
                f"set train.warmup_steps=null and train.warmup_ratio (now {self.warmup_ratio:g}), a share of the run"
            )
            raise ConfigError(f"warmup_steps {self.warmup_steps:,} {what}", where=where, remedy=remedy)


# A section of overrides left empty in YAML (`data:`) is null there.
Overrides = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


class PhaseConfig(_Section):
    """One phase of training: what it changes in the sections `data` and `train`."""

    name: Name
    """Name of the folders of this phase."""
    data: Overrides = {}
    """Keys of the section `data` that differ in this phase."""
    train: Overrides = {}
    """Keys of the section `train` that differ in this phase."""
    time_share: Float = 1.0
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

    inputs: Inputs = ()
    """Raw text: files, globs, folders, URLs, or dataset:NAME[:config][@split]."""
    time: Seconds | None = None
    """Wall-clock time of `run`, all stages included, such as 1h or 1h30m; training takes what is left of it, whatever
    length the section `train` gives."""
    vocab: VocabConfig = VocabConfig()
    """Stage 1: the vocabulary."""
    data: DataConfig = DataConfig()
    """How raw text is read, and stage 2: sentence pairs."""
    model: ModelConfig = ModelConfig()
    """The network, by the names of Hugging Face's `BertConfig`; `vocab_size` comes from the tokenizer."""
    train: TrainConfig = TrainConfig()
    """Stage 3: the optimisation."""
    phases: Annotated[
        tuple[PhaseConfig, ...], Expects("a list in brackets, such as [{name: first, train: {max_steps: 900}}]")
    ] = ()
    """Phases of training, run in order; each may change keys of `data` and `train`."""

    def for_phase(self, phase: PhaseConfig) -> "Config":
        """Return this configuration with the phase's overrides applied and no phases."""
        tree = self.model_dump(mode="json", exclude={"phases"}, exclude_unset=True)
        for section in ("data", "train"):
            tree[section] = {**tree.get(section, {}), **getattr(phase, section)}
        return Config.model_validate(tree)

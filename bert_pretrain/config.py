"""The configuration: one YAML with a section for each stage, checked once, here; everything inside trusts it.

Numbers and durations are read as people write them: `1e5`, `2 hours`, `64M`, `gpu`.
"""

import codecs
import contextlib
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
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
ENCODINGS = ("auto", "gb18030", "big5", "cp1252", "shift_jis")
_UNITS = {"d(?:ays?)?": 86400, "h(?:(?:ou)?rs?)?": 3600, "m(?:in(?:ute)?s?)?": 60, "s(?:ec(?:ond)?s?)?": 1}
_DURATION = re.compile(r"\s*" + "".join(rf"(?:([\d.]+(?:e-?\d+)?)\s*{unit}\s*)?" for unit in _UNITS), re.IGNORECASE)


def _whole_number(value: object) -> object:
    """Accept `1e5` where a whole number is expected."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d+", value) and float(value).is_integer():
        return int(float(value))
    return value


def _seconds(value: object) -> object:
    """Accept `24h`, `1h30m`, `2 hours`, `90 min` where a duration is expected; a bare number is seconds."""
    if isinstance(value, str) and (found := _DURATION.fullmatch(value)) and any(found.groups()):
        with contextlib.suppress(ValueError):
            return sum(float(part) * size for part, size in zip(found.groups(), _UNITS.values(), strict=True) if part)
    return value


def duration_text(seconds: float) -> str:
    """Write a duration so that it reads back to the same number: `1h30m`, `2.5s`."""
    if not seconds.is_integer() or not seconds:
        return f"{seconds!r}s"
    minutes, rest = divmod(int(seconds), 60)
    parts = zip((*divmod(minutes, 60), rest), "hms", strict=True)
    return "".join(f"{number}{unit}" for number, unit in parts if number)


def check_encoding(name: str) -> str:
    """Return the name of an encoding of text that Python knows, or `auto`; any other is a ValueError."""
    try:
        if name != "auto":
            "".encode(name)  # refuses encodings of bytes
            codecs.getincrementaldecoder(name)("replace")
    except (LookupError, ValueError) as error:
        raise ValueError(f"there is no encoding {name!r}; there are for example {', '.join(ENCODINGS)}") from error
    return name


def _fields(value: object) -> object:
    """Accept `subject,body` for a list; a name with a comma is a list of one."""
    if not isinstance(value, str) or "," not in value:
        return value
    return [name.strip() for name in value.strip().removeprefix("[").removesuffix("]").split(",")]


def names_of(field: "TextField") -> tuple[str, ...]:
    """Return the names of the fields whose texts are joined, in order."""
    return (field,) if isinstance(field, str) else field


def _device(value: object) -> object:
    """Accept `gpu` for `cuda`, in any case."""
    return re.sub("^gpu", "cuda", value.strip().lower()) if isinstance(value, str) else value


def _in_utf8(names: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse names of files that are not UTF-8, which no YAML can hold; their folder may be named."""
    for name in names:
        if name != name.encode(errors="replace").decode():
            raise ValueError(f"the name {name!r} is not UTF-8; rename the file, or name its folder")
    return names


def _boundaries(value: object) -> object:
    """Accept `a.txt=line,b.txt=file` for a value for each input."""
    if not isinstance(value, str) or "=" not in value:
        return value
    return {name: boundary for name, _, boundary in (part.rpartition("=") for part in value.split(","))}


def _or_text(*examples: str, **limits: float) -> WithJsonSchema:
    """Let editors accept a text such as `24h` as well as a number."""
    return WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}], "examples": list(examples), **limits})


# The JSON schema of a type says in messages what its values are: by its limits, or by examples.
Whole = BeforeValidator(_whole_number)
Int = Annotated[int, Whole]
PositiveInt = Annotated[int, Field(gt=0), Whole]
Float = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
NonEmpty = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0), BeforeValidator(_seconds), _or_text("90s", "30m", "1h30m", "2 days")]
RecordBytes = Annotated[
    ByteSize, AfterValidator(int), Field(ge=MIN_RECORD_BYTES), _or_text("64M", minimum=MIN_RECORD_BYTES)
]
_DEVICES = Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$", examples=["auto", "cpu", "cuda", "cuda:1"])
Device = Annotated[str, _DEVICES, BeforeValidator(_device)]
Encoding = Annotated[str, AfterValidator(check_encoding), Field(examples=list(ENCODINGS))]
_Names = Annotated[tuple[NonEmpty, ...], Field(min_length=1)]
TextField = Annotated[NonEmpty | _Names, BeforeValidator(_fields), Field(examples=["text", "subject,body"])]
Boundary = Literal["auto", "blank_line", "line", "file"]
_BOUNDARIES = Field(examples=["auto", "blank_line", "line", "file", "a.txt=line"])
DocumentBoundary = Annotated[Boundary | dict[str, Boundary], BeforeValidator(_boundaries), _BOUNDARIES]
Inputs = Annotated[tuple[str, ...], AfterValidator(_in_utf8), Field(examples=[["a.txt", "corpus/*.gz"]])]
# A section left empty in YAML (`data:`) is null there.
Overrides = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


class _Section(BaseModel):
    # The texts below the keys are their descriptions: for `bert-pretrain config`, docs/keys.md and configs/schema.json.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class VocabConfig(_Section):
    """Stage 1: the vocabulary."""

    tokens: Literal["wordpiece", "words"] = "wordpiece"
    """Pieces of words, or whole words of text that is tokenized already: split at white space, otherwise as it is, so
    that `lowercase`, `strip_accents`, `handle_chinese_chars` and `limit_alphabet` are without effect."""
    size: Annotated[int, Field(ge=6), Whole] = 30522
    """Tokens in the vocabulary, special and unused ones included; never exceeded."""
    lowercase: bool = True
    """Lowercase the text before it is split."""
    strip_accents: bool | None = None
    """Remove accents; null removes them from lowercased text as BERT does, unless the text shows that they matter."""
    handle_chinese_chars: bool = True
    """Make every CJK character a word of its own."""
    min_frequency: PositiveInt = 2
    """Least number of occurrences of a token."""
    limit_alphabet: PositiveInt | None = None
    """Characters kept; null keeps the most frequent ones up to a coverage of 99.99 %."""
    unused_tokens: Annotated[int, Field(ge=0), Whole] = 99
    """Unused slots between [PAD] and [UNK]; 99 gives BERT's own special ids."""
    add_tokens: PositiveInt | None = None
    """With `vocab --extend`: tokens to add, into unused slots first, then at the end; null means as many as slots."""
    seed: Int = 12345
    """Random seed of the choice of documents held out to measure the vocabulary."""


class DataConfig(_Section):
    """How raw text is read, and stage 2: sentence pairs (Devlin et al., 2018, section 3.1 and appendix A.1)."""

    max_seq_length: Annotated[int, Field(ge=8, le=65535), Whole] = 128
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
    """Masks are stored in the shards (static), or drawn again in every epoch of training (dynamic)."""
    sentence_splitter: Literal["auto", "lines", "sentencex"] = "auto"
    """One sentence per line, or running text that `sentencex` cuts; auto looks at the text of each input."""
    language: Annotated[str, Field(min_length=2, examples=["auto", "en", "zh"])] = AUTO_LANGUAGE
    """An ISO 639 code, for sentences, accents and the model card; auto: recognized at the beginnings of the inputs."""
    document_boundary: DocumentBoundary = "auto"
    """What ends a document of a text file: a blank line, every line, or its end; auto: blank lines where it has one
    sentence per line, else its end; INPUT=line is for one input."""
    encoding: Encoding = "utf-8"
    """Encoding of text files, such as gb18030, big5 or cp1252; `auto` tells that of each file from its beginning."""
    text_field: TextField = "text"
    """Field of a JSON record, or column of a table, that holds the text; of several, [A, B], the texts of those that an
    input has are joined."""
    strict: bool = False
    """Refuse text that is not valid in its encoding and records without a text, instead of counting them."""
    max_record_bytes: RecordBytes = MAX_RECORD_BYTES  # type: ignore[assignment]
    """Largest record that is read: a line of JSONL, a row of CSV or Parquet, which is held in memory."""
    validation_fraction: Share = 0.01
    """Share of the documents held out for validation."""
    validation: Inputs = ()
    """Inputs of your own validation split, instead of `validation_fraction`."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the text that is read: of more than 16 inputs that share of them, of fewer pieces of 8 MiB of each."""
    input_weights: Annotated[dict[str, Float], Field(examples=[{"a.txt": 3}])] = {}
    """How many times as often as others an input is seen; 1 for inputs that are not named."""
    drop_duplicates: bool = True
    """Leave out documents that equal another one token by token; those for validation stay."""
    examples_per_shard: Annotated[int, Field(ge=64), Whole] = 16384
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
    type_vocab_size: Annotated[int, Field(ge=2), Whole] = 2
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
    warmup_steps: Annotated[int, Field(ge=0), Whole] | None = None
    """Steps of warm-up, in place of `warmup_ratio`; not with `time_budget`, and no more than the run has."""
    init: Literal["normal", "positional_heads", "word_vectors"] = "normal"
    """First weights: BERT's; heads in the first layer that attend to neighbouring tokens; or these heads, and word
    embeddings from counts of neighbouring tokens."""
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
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay of the first and the second moment in AdamW and LAMB."""
    eps: Float = 1e-6
    """Added to the denominator of AdamW and LAMB."""
    max_grad_norm: Float = 1.0
    """Gradients with a larger norm are clipped to it."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of matrix products; auto: bf16 where the device has it, else fp16 on CUDA and fp32 on the CPU."""
    attention: Literal["auto", "varlen", "padded"] = "auto"
    """Sequences packed without padding (varlen) or padded; auto: packed where the device supports it."""
    compile: bool | Literal["auto"] = "auto"
    """Use torch.compile; auto: on CUDA, where attention does not pad."""
    activation_checkpointing: bool = False
    """Compute a layer's activations again in its backward pass instead of keeping them: a third more work, far less
    memory."""
    device: Device = "auto"
    """Device that computes; auto: CUDA where there is some, else the CPU; `cuda`: that of the process."""
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

    def check_warmup(self, steps: int | None, where: str = "train.warmup_steps") -> None:
        """Refuse `warmup_steps` that do not fit into a schedule of `steps`; None where the clock ends the run."""
        if self.warmup_steps is None or (steps is not None and self.warmup_steps <= steps):
            return
        length = "the clock ends the run" if steps is None else f"the run has {steps:,} steps"
        what = f"warmup_steps {self.warmup_steps:,} does not fit: {length}"
        remedy = f"set train.warmup_steps=null and train.warmup_ratio (now {self.warmup_ratio:g}), a share of the run"
        raise ConfigError(what, where=where, remedy=remedy)


class PhaseConfig(_Section):
    """One phase of training: what it changes in the sections `data` and `train`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", examples=["first", "512-tokens"])]
    """Name of the folders of this phase: letters, digits, '.', '_' and '-', the first a letter or digit."""
    data: Overrides = {}
    """Keys of the section `data` that differ in this phase."""
    train: Overrides = {}
    """Keys of the section `train` that differ in this phase."""
    time_share: Float = 1.0
    """With `time`: what the phase gets of the time for training, relative to the other phases."""


class Config(_Section):
    """The whole configuration of `bert-pretrain`."""

    inputs: Inputs = ()
    """Raw text: files, globs, folders, URLs, or dataset:NAME[:config][@split]."""
    time: Seconds | None = None
    """Wall-clock time of `run`, all stages included, such as 1h or 1h30m; training takes what is left of it, and
    the length in the section `train` has no effect."""
    vocab: VocabConfig = VocabConfig()
    """Stage 1: the vocabulary."""
    data: DataConfig = DataConfig()
    """How raw text is read, and stage 2: sentence pairs."""
    model: ModelConfig = ModelConfig()
    """The network, by the names of Hugging Face's `BertConfig`; `vocab_size` comes from the tokenizer."""
    train: TrainConfig = TrainConfig()
    """Stage 3: the optimisation."""
    phases: Annotated[tuple[PhaseConfig, ...], Field(examples=[[{"name": "first", "train": {"max_steps": 900}}]])] = ()
    """Phases of training, run in order; each may change keys of `data` and `train`."""

    @model_validator(mode="after")
    def _phases_have_names(self) -> "Config":
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"two phases share a name: {', '.join(names)}")
        return self

    def for_phase(self, phase: PhaseConfig) -> "Config":
        """Return this configuration with the phase's overrides applied and no phases."""
        tree = self.model_dump(mode="json", exclude={"phases"}, exclude_unset=True)
        for section in ("data", "train"):
            tree[section] = {**tree.get(section, {}), **getattr(phase, section)}
        return Config.model_validate(tree)

"""The configuration: the type, default, limits and meaning of every key, in one section per stage.

Durations may be written as `2 hours`, and sizes as `64M`. Checks that need several layers of a configuration are in
`config_file.py`; stages check what depends on data or machine.
"""

import codecs
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

MIN_RECORD_BYTES, MAX_RECORD_BYTES = 4 << 20, 64 << 20  # the minimum of `data.max_record_bytes`, and its default
DEFAULT_EVAL_EVERY = 1000
AUTO_LANGUAGE = "auto"
SINGLE_CHARACTERS = "characters"  # a value of `data.word_segmenter`
LENGTHS = ("max_steps", "max_epochs", "time_budget")  # keys of `train` for the length of a run; only one is allowed
ENCODINGS = ("auto", "gb18030", "big5", "cp1252", "shift_jis")
_UNIT_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_UNIT = "d(?:ays?)?|h(?:(?:ou)?rs?)?|m(?:in(?:ute)?s?)?|s(?:ec(?:ond)?s?)?"
_NUMBER_AND_UNIT = rf"\s*(\d*\.?\d+(?:e-?\d+)?)\s*({_UNIT})\s*"


def _parse_duration(value: object) -> object:
    """Accept `24h`, `1h30m`, `2 hours` and `90 min` as durations. A number without a unit is in seconds."""
    if not isinstance(value, str) or not re.fullmatch(f"({_NUMBER_AND_UNIT})+", value.lower()):
        return value
    parts = re.findall(_NUMBER_AND_UNIT, value.lower())
    return sum(float(number) * _UNIT_SECONDS[unit[0]] for number, unit in parts)


def duration_text(seconds: float) -> str:
    """Format a duration in seconds so that it parses back to the same number: `1h30m`, `2.5s`."""
    if not seconds.is_integer() or not seconds:
        return f"{seconds!r}s"
    minutes, rest = divmod(int(seconds), 60)
    parts = zip((*divmod(minutes, 60), rest), "hms", strict=True)
    return "".join(f"{number}{unit}" for number, unit in parts if number)


def duration(seconds: float) -> str:
    """Format a time as `2d 3h`, `1h 05m`, `2m 03s` or `4.5s`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def check_encoding(name: str) -> str:
    """Return `name` if it is `auto` or a text encoding of Python, otherwise raise ValueError."""
    try:
        if name != "auto":
            "".encode(name)  # fails for bytes-to-bytes codecs
            codecs.getincrementaldecoder(name)("replace")
    except (LookupError, ValueError) as error:
        raise ValueError(f"unknown encoding {name!r}; use for example {', '.join(ENCODINGS)}") from error
    return name


def _parse_fields(value: object) -> object:
    """Accept `subject,body` as a list. A name that contains a comma must be given in a list."""
    if not isinstance(value, str) or "," not in value:
        return value
    return [name.strip() for name in value.strip("[] ").split(",")]


def names_of(field: "TextField") -> tuple[str, ...]:
    """Return the names of the text fields in the order in which their texts are joined."""
    return (field,) if isinstance(field, str) else field


def _check_utf8(names: tuple[str, ...]) -> tuple[str, ...]:
    """Raise ValueError for file names that are not UTF-8, because a YAML file cannot contain them."""
    for name in names:
        if name != name.encode(errors="replace").decode():
            raise ValueError(f"the name {name!r} is not UTF-8; rename the file, or give its folder instead")
    return names


def _parse_per_input(value: object) -> object:
    """Accept `a.txt=line,b.txt=file`, and a list such as `["a.txt=3"]`, as a value per input."""
    if isinstance(value, str) and "=" in value:
        value = value.split(",")
    if not isinstance(value, list):
        return value
    parts = [str(part).rpartition("=") for part in value]
    return {name: part for name, _, part in parts}


def _number_or_string(*examples: str, **limits: float) -> WithJsonSchema:
    """Return a JSON schema with which editors accept `24h` as well as a number."""
    return WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}], "examples": list(examples), **limits})


# Error messages describe the valid values by the limits or examples in the JSON schema of these types.
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Float = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
NonEmpty = Annotated[str, Field(min_length=1)]
_DURATIONS = _number_or_string("90s", "30m", "1h30m", "2 days")
Seconds = Annotated[float, Field(gt=0), BeforeValidator(_parse_duration), _DURATIONS]
_SIZES = _number_or_string("64M", minimum=MIN_RECORD_BYTES)
RecordBytes = Annotated[ByteSize, AfterValidator(int), Field(ge=MIN_RECORD_BYTES), _SIZES]
_DEVICES = Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$", examples=["auto", "cpu", "cuda", "cuda:1"])
Device = Annotated[str, _DEVICES]
Encoding = Annotated[str, AfterValidator(check_encoding), Field(examples=list(ENCODINGS))]
_Names = Annotated[tuple[NonEmpty, ...], Field(min_length=1)]
TextField = Annotated[NonEmpty | _Names, BeforeValidator(_parse_fields), Field(examples=["text", "subject,body"])]
Boundary = Literal["auto", "blank_line", "line", "file"]
_BOUNDARIES = Field(examples=["auto", "blank_line", "line", "file", "a.txt=line"])
DocumentBoundary = Annotated[Boundary | dict[str, Boundary], BeforeValidator(_parse_per_input), _BOUNDARIES]
Inputs = Annotated[tuple[str, ...], AfterValidator(_check_utf8), Field(examples=[["a.txt", "corpus/*.gz"]])]
_WEIGHTS = Field(examples=[{"a.txt": 3}])
Weights = Annotated[dict[str, Float], BeforeValidator(_parse_per_input), _WEIGHTS]
Architecture = Literal["bert", "modernbert", "albert", "electra"]
Tracker = Literal["tensorboard", "wandb"]
_EMPTY = BeforeValidator(lambda value: {} if value is None else value)  # an empty section in YAML (`data:`) is null
Overrides = Annotated[dict[str, Any], _EMPTY, Field(examples=[{"seed": 1}])]


class _Section(BaseModel):
    # The docstrings of the keys appear in `bert-pretrain config`, docs/keys.md and configs/schema.json.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class VocabConfig(_Section):
    """Stage 1: the vocabulary."""

    tokens: Literal["wordpiece", "words"] = "wordpiece"
    """Subwords, or words of tokenized text, which is only split at white space: `lowercase`, `strip_accents`,
    `handle_chinese_chars` and `limit_alphabet` then have no effect."""
    size: Annotated[int, Field(ge=6)] = 30522
    """Maximum number of tokens in the vocabulary, including special and unused tokens."""
    lowercase: bool | None = None
    """Lowercase the text before tokenization; null: in English and Chinese, as in BERT; other languages keep case."""
    strip_accents: bool | None = None
    """Remove accents; null: remove them from lowercased text like BERT, unless the text shows that they matter."""
    handle_chinese_chars: bool = True
    """Treat every CJK character as a word."""
    min_frequency: PositiveInt = 2
    """Minimum number of occurrences of a merged pair, of a whole word, or of a token that `vocab --extend` adds."""
    limit_alphabet: PositiveInt | None = None
    """Maximum number of characters; null: all of ASCII, and the most frequent ones that cover 99.99 % of the text."""
    unused_tokens: NonNegativeInt = 99
    """Number of unused slots between [PAD] and [UNK]; 99 gives the special token ids of BERT."""
    add_tokens: PositiveInt | None = None
    """With `vocab --extend`: number of tokens to add, first in unused slots, then at the end; null: fill the slots."""
    seed: int = 12345
    """Random seed for choosing the held-out documents that measure the vocabulary."""


class DataConfig(_Section):
    """Reading of raw text, and stage 2: training examples (Devlin et al., 2018, section 3.1 and appendix A.1)."""

    max_seq_length: Annotated[int, Field(ge=8, le=65535)] = 128
    """Maximum tokens per example, including [CLS] and [SEP]."""
    dupe_factor: PositiveInt = 5
    """Number of copies of the corpus, each with different pairs and masks."""
    short_seq_prob: Probability = 0.1
    """Probability of a random, shorter target length of an example; no effect without pairs (`next_sentence: none`)."""
    masked_lm_prob: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """Share of tokens to predict."""
    max_predictions_per_seq: PositiveInt | None = None
    """Maximum predicted tokens per example; null: `masked_lm_prob` * `max_seq_length`, rounded up."""
    whole_word_mask: bool = False
    """Mask all subwords of a word together."""
    word_segmenter: Literal["jieba", "characters"] | None = None
    """Chinese word segmenter for `whole_word_mask`; characters: one per word; null: jieba if the text is Chinese."""
    next_sentence: Literal["nsp", "sop", "none"] = "nsp"
    """Sentence pair task: nsp, does B follow A or come from another document (BERT); sop, are A and B in order or
    swapped (ALBERT); none, full sentences without pairs (RoBERTa)."""
    masking: Literal["static", "dynamic"] = "static"
    """Store the masks in the shards (static), or draw new masks in every epoch of training (dynamic)."""
    sentence_splitter: Literal["auto", "lines", "sentencex"] = "auto"
    """One sentence per line (lines), or running text that `sentencex` splits; auto: chosen per input from its text."""
    language: Annotated[str, Field(min_length=2, examples=["auto", "en", "zh"])] = AUTO_LANGUAGE
    """ISO 639 code of the language, for sentences, case, accents and the model card; auto: from the inputs."""
    document_boundary: DocumentBoundary = "auto"
    """End of a document in a text file: a blank line, every line, or the end of the file; auto: blank lines in files
    with one sentence per line, otherwise the end of the file; INPUT=line sets one input."""
    encoding: Encoding = "utf-8"
    """Encoding of text files, such as gb18030, big5 or cp1252; auto: detected from the start of each file."""
    text_field: TextField = "text"
    """JSON field or table column with the text; for a list, [A, B], the texts of the fields of an input are joined."""
    strict: bool = False
    """Stop at text that is invalid in its encoding and at records without text, instead of counting them."""
    max_record_bytes: RecordBytes = MAX_RECORD_BYTES  # type: ignore[assignment]
    """Maximum size of a record, which is read into memory: a line of JSONL, a row of CSV or Parquet."""
    validation_fraction: Share = 0.01
    """Share of documents in the validation split; the default holds out at most 1.28 million tokens."""
    validation: Inputs = ()
    """Inputs to use as the validation split, instead of `validation_fraction`."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the text to read: with more than 16 inputs, a share of the inputs; otherwise spaced parts of each."""
    input_weights: Weights = {}
    """How often the text of an input is used, relative to other inputs; 1 for inputs without an entry."""
    drop_duplicates: bool = True
    """Keep one of several documents with equal text: from `validation`, else from the input with the most weight."""
    examples_per_shard: Annotated[int, Field(ge=64)] = 16384
    """Examples in each Parquet file."""
    seed: int = 12345
    """Random seed of pairs, masks, order and the validation split."""

    @property
    def segments_words(self) -> bool:
        """Whether a segmenter finds the words of Chinese text."""
        return self.word_segmenter == "jieba"

    @model_validator(mode="after")
    def _segmenter_needs_whole_words(self) -> "DataConfig":
        if self.word_segmenter and not self.whole_word_mask:
            raise ValueError(f"word_segmenter {self.word_segmenter} requires whole_word_mask: true")
        return self


class ModelConfig(_Section):
    """The network, with the names of Hugging Face's `BertConfig`; `vocab_size` comes from the tokenizer."""

    architecture: Architecture = "bert"
    """BERT (Devlin et al., 2018), ModernBERT (Warner et al., 2024), which has no sentence pairs, ALBERT (Lan et al.,
    2019), whose layers share their weights, or ELECTRA (Clark et al., 2020), for `train.objective: electra`."""
    hidden_size: PositiveInt = 768
    """Width of the hidden states."""
    num_hidden_layers: PositiveInt = 12
    """Number of encoder layers."""
    num_attention_heads: PositiveInt = 12
    """Number of attention heads per layer; must divide `hidden_size`."""
    intermediate_size: PositiveInt = 3072
    """Width of the feed-forward layers; in ModernBERT they have three matrices instead of two: use two thirds."""
    hidden_act: Literal["gelu"] = "gelu"
    """Activation function (exact GELU)."""
    hidden_dropout_prob: Share = 0.1
    """Dropout probability of the embeddings and of the output of each block."""
    attention_probs_dropout_prob: Share = 0.1
    """Dropout probability of the attention probabilities."""
    max_position_embeddings: PositiveInt = 512
    """Maximum sequence length of the model, in tokens."""
    type_vocab_size: Annotated[int, Field(ge=2)] = 2
    """Number of token types (segments A and B)."""
    initializer_range: Float = 0.02
    """Standard deviation of the initial weights."""
    layer_norm_eps: Float = 1e-12
    """Epsilon of layer normalization."""
    biases: bool = True
    """ModernBERT: biases in all matrices and in layer normalization. Published models have none."""
    global_attn_every_n_layers: PositiveInt = 3
    """ModernBERT: one layer of this number attends to the whole sequence, the others to a window; 1: all layers."""
    local_attention: Annotated[int, Field(ge=2)] = 128
    """ModernBERT: width of the window in tokens, half of it on each side, rounded down."""
    global_rope_theta: Float = 160_000.0
    """ModernBERT: base of the rotary positions in layers that attend to the whole sequence."""
    local_rope_theta: Float = 10_000.0
    """ModernBERT: base of the rotary positions in layers with a window."""
    embedding_size: PositiveInt | None = None
    """ALBERT and ELECTRA: width of the embeddings, which a matrix projects on `hidden_size`; null: `hidden_size`."""
    generator_size: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25
    """ELECTRA: share of the discriminator's width, heads and intermediate size that the generator has; whole heads."""

    @property
    def is_modern(self) -> bool:
        return self.architecture == "modernbert"

    @property
    def is_albert(self) -> bool:
        return self.architecture == "albert"

    @property
    def is_electra(self) -> bool:
        return self.architecture == "electra"

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def projects_embeddings(self) -> bool:
        """Whether a matrix projects the embeddings on the hidden size. An ALBERT always has one."""
        return self.is_albert or self.embedding_width != self.hidden_size

    @property
    def has_pair_heads(self) -> bool:
        """Whether there is a pooler, with a head for sentence pairs."""
        return self.architecture in ("bert", "albert")

    @property
    def generator(self) -> "ModelConfig":
        """The network of ELECTRA's generator, which has the same embeddings and whole heads of the same size."""
        heads = max(1, round(self.generator_size * self.num_attention_heads))
        sizes = {
            "hidden_size": heads * self.hidden_size // self.num_attention_heads,
            "num_attention_heads": heads,
            "intermediate_size": max(1, round(self.generator_size * self.intermediate_size)),
            "embedding_size": self.embedding_width,
        }
        return self.model_copy(update=sizes)

    @model_validator(mode="after")
    def _sizes_fit(self) -> "ModelConfig":
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads:
            raise ValueError(f"hidden_size {width} is not a multiple of num_attention_heads {heads}")
        if self.is_modern and width // heads % 2:
            raise ValueError(
                f"modernbert needs an even head size; hidden_size / num_attention_heads is {width // heads}"
            )
        if not self.is_modern and not self.biases:
            raise ValueError("biases is false; BERT has biases; set architecture to modernbert")
        if self.embedding_size and not (self.is_albert or self.is_electra):
            raise ValueError(f"embedding_size is {self.embedding_size}; set architecture to albert or electra")
        if self.is_albert and self.embedding_width > width:
            raise ValueError(f"embedding_size {self.embedding_size} is above hidden_size {width}")
        return self


class TrainConfig(_Section):
    """Stage 3: training (Devlin et al., 2018, appendix A.2)."""

    objective: Literal["mlm", "electra"] = "mlm"
    """Predict masked tokens, or find the tokens that a generator has replaced (Clark et al., 2020)."""
    discriminator_weight: Float = 50.0
    """ELECTRA: weight of the discriminator's loss per token; that of the generator's loss per masked token is 1."""
    global_batch_size: PositiveInt = 256
    """Examples per optimizer step, over all micro-batches and ranks."""
    micro_batch_tokens: PositiveInt | Literal["auto"] = "auto"
    """Tokens per micro-batch; changes speed and memory, hardly the result; auto: as many as fit, on CPU up to 4,096."""
    max_steps: PositiveInt | None = None
    """Length of the run in steps; null: 100,000, unless `max_epochs` or `time_budget` is set."""
    max_epochs: Float | None = None
    """Length of the run in passes over the training examples; fractions are allowed."""
    time_budget: Seconds | None = None
    """Length of the run in wall-clock time, including evaluations and checkpoints, such as 24h or 1h30m."""
    optimizer: Literal["adamw", "lamb", "muon"] = "adamw"
    """Optimizer; `muon` applies to the matrices of the encoder layers, and AdamW to all other parameters."""
    bias_correction: bool = True
    """Correct the bias of the moments in AdamW and LAMB; the code of the paper does not."""
    peak_lr: Float = 1e-4
    """Learning rate at the end of the warm-up."""
    warmup_ratio: Probability = 0.01
    """Share of the run for the warm-up of the learning rate from 0 to `peak_lr`."""
    warmup_steps: NonNegativeInt | None = None
    """Number of warm-up steps, instead of `warmup_ratio`; at most the steps of the run, and not with `time_budget`."""
    init: Literal["normal", "positional_heads", "cooccurrences"] = "normal"
    """Initial weights: as in BERT, with heads that attend to neighbors, or also from counts of neighboring tokens."""
    mlm_bias: Literal["zeros", "unigram"] = "zeros"
    """Initial output bias: zeros, or log token frequencies, which saves learning them (Meister et al., 2023)."""
    softmax_candidates: NonNegativeInt = 0
    """Number of candidates of a sampled softmax, for small networks (Jean et al., 2015); 0: the whole vocabulary."""
    teacher: NonEmpty | None = None
    """Folder of a larger BERT with the same vocabulary, for initial weights where shapes allow (Sanh et al., 2019)."""
    distillation: bool = False
    """Also compare distributions and hidden states with the teacher's in the loss (DistilBERT; Sanh et al., 2019)."""
    schedule: Literal["linear", "cosine", "wsd"] = "linear"
    """Decay of the learning rate after the warm-up; wsd: constant at `peak_lr`, then decay in the last tenth."""
    schedule_steps: PositiveInt | None = None
    """Length of the learning rate schedule in steps, if phases share one; null: the steps of the run."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    """Decoupled weight decay, only for matrices."""
    betas: Annotated[tuple[Share, Share], Field(examples=[[0.9, 0.98]])] = (0.9, 0.999)
    """Decay rates of the first and second moments in AdamW and LAMB."""
    eps: Float = 1e-6
    """Epsilon of AdamW and LAMB."""
    max_grad_norm: Float = 1.0
    """Maximum gradient norm for gradient clipping."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of matrix products; auto: bf16 if the device supports it, else fp16 on CUDA and fp32 on the CPU."""
    attention: Literal["auto", "varlen", "padded"] = "auto"
    """Attention without padding (varlen) or with padding; auto: without, if device, precision and head size allow it
    and `attention_probs_dropout_prob` is 0."""
    compile: bool | Literal["auto"] = "auto"
    """Use torch.compile on CUDA if attention does not pad; false: never."""
    activation_checkpointing: bool = False
    """Recompute the activations of a layer in its backward pass: a third more compute, far less memory."""
    device: Device = "auto"
    """Device to train on; auto: CUDA if available, otherwise the CPU; cuda: the device of the rank."""
    log_every: PositiveInt = 10
    """Steps between lines in the log and in `metrics.jsonl`."""
    eval_every: PositiveInt = DEFAULT_EVAL_EVERY
    """Steps between evaluations on the validation split; with a time budget, by default also every eighth of it."""
    eval_examples: PositiveInt | None = 10_000
    """Validation examples per evaluation, the same each time; the last evaluation uses all; null: always all."""
    save_every: PositiveInt = 1000
    """Steps between checkpoints; after a crash, the run resumes from the newest one."""
    keep_checkpoints: PositiveInt = 3
    """Number of newest checkpoints to keep."""
    trackers: Annotated[tuple[Tracker, ...], Field(examples=[["tensorboard", "wandb"]])] = ()
    """Experiment trackers for the metrics, in addition to `metrics.jsonl`."""
    seed: int = 12345
    """Random seed of initial weights, dropout and the order of examples."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        lengths = [f"{name} {value:g}" for name in LENGTHS if (value := getattr(self, name)) is not None]
        if len(lengths) > 1:
            raise ValueError(f"{' and '.join(lengths)} are all lengths of the run; keep one")
        return self

    @model_validator(mode="after")
    def _distillation_needs_a_teacher(self) -> "TrainConfig":
        if self.distillation and self.teacher is None:
            raise ValueError("distillation needs a teacher; set teacher to the folder of a trained model")
        return self

    @property
    def planned_steps(self) -> int | None:
        """Number of steps of the run, or None if it depends on the data or the clock."""
        if self.max_epochs is not None or self.time_budget is not None:
            return None
        return self.max_steps or 100_000

    def check_warmup(self, steps: int | None, where: str = "train.warmup_steps") -> None:
        """Raise ConfigError if `warmup_steps` exceed a schedule of `steps`, or if `steps` is None (a time budget)."""
        if self.warmup_steps is None or (steps is not None and self.warmup_steps <= steps):
            return
        length = "the run has a time limit, not a number of steps" if steps is None else f"the run has {steps:,} steps"
        what = f"warmup_steps {self.warmup_steps:,} does not fit: {length}"
        remedy = f"set train.warmup_steps=null and train.warmup_ratio (now {self.warmup_ratio:g}), a share of the run"
        raise ConfigError(what, where=where, remedy=remedy)


PHASE_SECTIONS = ("data", "model", "train")
_THETAS = Field(examples=[{"global_rope_theta": 160000}])
PhaseModel = Annotated[dict[Literal["global_rope_theta"], Float], _EMPTY, _THETAS]


class PhaseConfig(_Section):
    """One phase of training, with overrides of the sections `data`, `model` and `train`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", examples=["first", "512-tokens"])]
    """Name of the folders of this phase: letters, digits, '.', '_' and '-', starting with a letter or digit."""
    data: Overrides = {}
    """Keys of the section `data` that differ in this phase."""
    model: PhaseModel = {}
    """Keys of the section `model` that differ in this phase; only `global_rope_theta` may, for longer sequences."""
    train: Overrides = {}
    """Keys of the section `train` that differ in this phase."""
    time_share: Float = 1.0
    """With `time`: the phase's share of the training time, relative to the other phases."""


_PHASES = Field(examples=[[{"name": "first", "train": {"max_steps": 900}}]])


class Config(_Section):
    """The complete configuration of `bert-pretrain`."""

    inputs: Inputs = ()
    """Raw text: files, globs, folders, URLs, or dataset:NAME[:config][@split]."""
    time: Seconds | None = None
    """Wall-clock time of `run` with all stages, such as 1h or 1h30m; training takes the time that is left, and the
    length in the section `train` has no effect."""
    vocab: VocabConfig = VocabConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    phases: Annotated[tuple[PhaseConfig, ...], _PHASES] = ()
    """Phases of training, in order; each may override keys of `data` and `train`."""

    @model_validator(mode="before")
    @classmethod
    def _objective_names_the_network(cls, tree: Any) -> Any:
        """Set an unset `model.architecture` to electra if that is the objective."""
        sections = [tree.get(name) or {} for name in ("model", "train")] if isinstance(tree, dict) else []
        if not all(isinstance(section, dict) for section in sections):
            return tree
        if sections and sections[1].get("objective") == "electra":
            return {**tree, "model": {"architecture": "electra", **sections[0]}}
        return tree

    @model_validator(mode="after")
    def _phases_have_names(self) -> "Config":
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"two phases share a name: {', '.join(names)}")
        return self

    @property
    def phase_configs(self) -> list["Config"]:
        """The configuration of each phase, or only this one if it has no phases."""
        return [self.for_phase(phase) for phase in self.phases] or [self]

    def for_phase(self, phase: PhaseConfig) -> "Config":
        """Return this configuration with the overrides of `phase` and without phases."""
        tree = self.model_dump(mode="json", exclude={"phases"}, exclude_unset=True)
        for section in PHASE_SECTIONS:
            tree[section] = {**tree.get(section, {}), **getattr(phase, section)}
        return Config.model_validate(tree)

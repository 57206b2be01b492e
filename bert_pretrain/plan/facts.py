"""The facts that a plan needs: properties of a corpus, and the training speed of a machine.

The facts of a corpus are estimated from a bounded sample. The facts of a machine are a JSON file: a shipped one
(`machines/`), or one that `timing.py` measures.
"""

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from bert_pretrain.config import Architecture, DataConfig, ModelConfig
from bert_pretrain.errors import ConfigError, InputError, first_problem
from bert_pretrain.text import documents
from bert_pretrain.text.corpus import Corpus
from bert_pretrain.text.languages import MIN_CHINESE_SHARE, chinese_share
from bert_pretrain.text.sentences import SentenceSplitter
from bert_pretrain.text.sources import MAX_SAMPLED_SOURCES, MIN_CORPUS_DOCUMENTS, Source
from bert_pretrain.train.flops import known_card, training_flops

SAMPLE_BYTES = 4 << 20
TOKENS_PER_BYTE = {False: 0.24, True: 0.30}  # by whether the text is Chinese; measured on the corpora in RESULTS.md
MASKED_SHARE = 0.3  # share of the tokens that are predicted, in timed steps and in plans
CPU_CANDIDATES = 2048  # tokens of the sampled softmax on a CPU, in timed steps and in plans
SHIPPED = Path(__file__).with_name("machines")
BYTES_PER_WEIGHT = 24  # in training: weights, gradients, moments and their casts


@dataclass(frozen=True)
class TextFacts:
    """Properties of a corpus, counted in a sample and scaled to the whole corpus."""

    num_bytes: float  # of the text, uncompressed
    documents: float
    sentences_per_document: float  # median over the documents of the sample
    single_sentence_share: float  # share of documents with a single sentence, too short for a pair
    cjk_share: float  # share of letters that are Chinese characters
    is_divisible: bool  # whether a fraction can be read: many files, or files of several documents
    vocab_reads_all: bool = False  # whether `vocab` reads all text: few inputs that are compressed or not in UTF-8
    boundary: str = ""  # document boundary to use if the configured one makes fewer than `MIN_CORPUS_DOCUMENTS`
    documents_as_configured: float = 0.0  # number of documents with the configured boundary, if `boundary` is set
    language: str = "en"

    @property
    def megabytes(self) -> str:
        return rounded(self.num_bytes / 1e6)

    @property
    def is_chinese(self) -> bool:
        return self.cjk_share > MIN_CHINESE_SHARE

    @property
    def tokens(self) -> float:
        return self.num_bytes * TOKENS_PER_BYTE[self.is_chinese]

    def part(self, fraction: float) -> "TextFacts":
        """Return the facts of a fraction of the documents."""
        return replace(self, num_bytes=fraction * self.num_bytes, documents=fraction * self.documents)


def measure_text(inputs: Sequence[str], config: DataConfig) -> TextFacts:
    """Return the facts of a corpus from a sample.

    If the boundary is `auto` and makes few documents, blank lines and lines are tried as boundaries.
    """
    whole = Corpus.open(inputs, config)
    cjk_share = chinese_share(whole.texts)
    corpus = whole.training
    facts = _measure(corpus, cjk_share)
    has_lines = any(source.format == "txt" for source in corpus.sources)
    if config.document_boundary != "auto" or not has_lines or facts.documents >= MIN_CORPUS_DOCUMENTS:
        return facts
    for boundary in ("blank_line", "line"):
        sources = tuple(
            replace(source, boundary=boundary) if source.format == "txt" else source for source in corpus.sources
        )
        other = corpus.config.model_copy(update={"document_boundary": boundary})
        retried = _measure(replace(corpus, sources=sources, config=other), cjk_share)
        # Lines of one sentence are documents or hard-wrapped text; these cannot be told apart.
        are_documents = boundary == "blank_line" or retried.sentences_per_document >= 2
        if are_documents and retried.documents >= MIN_CORPUS_DOCUMENTS:
            return replace(retried, boundary=boundary, documents_as_configured=facts.documents)
    return facts


def _measure(corpus: Corpus, cjk_share: float) -> TextFacts:
    config = corpus.config
    sentences: list[float] = []  # number in each document
    num_bytes = 0  # of the text in UTF-8, without markup and escapes
    num_documents = 0.0
    with tempfile.TemporaryDirectory() as name:
        sample = corpus.sample(Path(name), SAMPLE_BYTES)
        for copy, share in zip(sample.corpus.sources, sample.shares, strict=True):
            splitter = SentenceSplitter(copy.splitter, config.language)
            counts = [0]
            for document in sample.read(copy):
                num_bytes += len(document.text.encode())
                counts[-1] += len(list(splitter.split(document.text, ends_document=document.ends_document)))
                if document.ends_document:
                    counts.append(0)
            counts = [count for count in counts if count]
            if copy.boundary == "file" and share < 1.0:  # the copy is a part of one document
                num_documents += len(counts) / sample.scale
                sentences += [round(count / share) for count in counts]
            else:
                num_documents += len(counts)
                sentences += counts
    if not sentences:
        raise InputError(
            "the inputs contain no text",
            where=corpus.sources[0].location,
            remedy="give files that contain text",
        )
    are_many = len(corpus.sources) > MAX_SAMPLED_SOURCES
    is_divisible = are_many or all(map(_is_divisible, sample.originals))
    return TextFacts(
        num_bytes=num_bytes * sample.scale,
        documents=num_documents * sample.scale,
        sentences_per_document=statistics.median(sentences),
        single_sentence_share=sentences.count(1) / len(sentences),
        cjk_share=cjk_share,
        language=config.language,
        is_divisible=is_divisible and config.fraction == 1.0,  # a configured fraction overrides one of the plan
        vocab_reads_all=not are_many and any(source.needs_decoding for source in sample.originals),
    )


def _is_divisible(source: Source) -> bool:
    parts = documents.cut(replace(source, fraction=1.0), documents.PART_BYTES)
    return source.has_documents_at_lines or len(parts) > 1


def rounded(number: float) -> str:
    """Format a number below 10 with two significant digits, and a larger one as a whole number."""
    return f"{number:,.0f}" if number >= 10.0 else f"{number:.2g}"


class Size(NamedTuple):
    """Layers and hidden size of a network. Heads are 64 wide, the feed-forward layer is four times as wide."""

    layers: int
    hidden: int

    def __str__(self) -> str:
        return f"L{self.layers}-H{self.hidden}"

    @property
    def weights(self) -> int:
        """Number of weights in the matrices of the encoder."""
        return 12 * self.layers * self.hidden**2

    def model_config(self, length: int, architecture: Architecture = "bert") -> ModelConfig:
        """Return the network of this size, without dropout. A ModernBERT has about as many weights as a BERT."""
        intermediate = 4 * self.hidden
        if architecture == "modernbert":
            intermediate = 8 * math.ceil(intermediate / 12)  # two thirds, as its layer has three matrices
        return ModelConfig(
            architecture=architecture,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            intermediate_size=intermediate,
            max_position_embeddings=length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )

    def flops_per_token(self, num_outputs: int, length: int) -> float:
        """Return the floating-point operations per training token, forward and backward, see `training_flops`."""
        return training_flops(
            self.model_config(length),
            num_outputs,
            1.0,
            length,
            MASKED_SHARE,
        )


# BERT-Tiny to BERT-Large, and one size between the smallest two of Turc et al. (2019).
SIZES = (
    Size(2, 128),
    Size(2, 256),
    Size(4, 256),
    Size(4, 512),
    Size(8, 512),
    Size(12, 768),
    Size(24, 1024),
)


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Speed(_Facts):
    """Training speed of a network."""

    layers: PositiveInt
    hidden: Annotated[int, Field(gt=0, multiple_of=64)]
    flops_per_second: PositiveFloat  # forward and backward, with large batches
    update_seconds: NonNegativeFloat  # optimizer time per step
    launch_seconds: NonNegativeFloat = 0.0  # shortest possible step, limited by kernel launches; about 0 on a CPU
    is_timed: bool = True  # False: extrapolated

    @property
    def size(self) -> Size:
        return Size(self.layers, self.hidden)

    def seconds(self, flops: float) -> float:
        """Return the time of a step of `flops` floating-point operations."""
        return max(self.launch_seconds, flops / self.flops_per_second + self.update_seconds)


class MachineFacts(_Facts):
    """Training speed of a machine, as stored in a JSON file."""

    version: Literal[1] = 1
    name: str = "this machine"
    source: str = "measured"
    device: Literal["cpu", "cuda"] = "cpu"
    cores: PositiveInt  # host cores, for vocabulary and data
    memory_bytes: PositiveInt  # device memory
    speeds: Annotated[tuple[Speed, ...], Field(min_length=1)]

    def speed(self, size: Size) -> Speed:
        """Return the speed of a network, which must be one of `speeds`."""
        return next(speed for speed in self.speeds if speed.size == size)

    def has_memory(self, memory_bytes: int) -> bool:
        """Return whether the device has this memory, within 10 %, because drivers report slightly different values."""
        return abs(self.memory_bytes - memory_bytes) < 0.1 * memory_bytes

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Sizes of the networks that fit into memory, the smallest first; only the first of `speeds` if none fits."""
        fitting = [speed.size for speed in self.speeds if BYTES_PER_WEIGHT * speed.size.weights < self.memory_bytes]
        return tuple(fitting) or (self.speeds[0].size,)

    def tokens_per_second(
        self,
        size: Size,
        vocab_size: int,
        length: int,
        batch_tokens: int,
    ) -> float:
        """Return the training speed in batches of `batch_tokens` tokens, without evaluations and checkpoints."""
        flops = batch_tokens * size.flops_per_token(num_outputs(self.device, vocab_size), length)
        return batch_tokens / self.speed(size).seconds(flops)


def num_outputs(device: str, vocab_size: int) -> int:
    """Return the number of logits per masked token in plans: with a sampled softmax those of its candidates."""
    return min(CPU_CANDIDATES, vocab_size) if device == "cpu" else vocab_size


def read_machine(name_or_file: str) -> MachineFacts:
    """Return the facts of a shipped machine or of a JSON file. Raise ConfigError if there is none or it is invalid."""
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.json"))}
    path = shipped.get(name_or_file, Path(name_or_file))
    try:
        return MachineFacts.model_validate_json(path.read_bytes())
    except OSError:
        what = f"there is no machine '{name_or_file}'"
    except ValidationError as error:
        what = f"{path} is not a file of machine facts: {first_problem(error)}"
    raise ConfigError(
        what,
        where="--machine",
        remedy=f"choose {', '.join(shipped)}, or OUTPUT/machine.json of a 'run auto'",
    )


def shipped_facts(device_name: str, memory_bytes: int, cores: int) -> MachineFacts | None:
    """Return the shipped facts of a card with this memory; None if there are none or not all networks were timed."""
    card = (known_card(device_name) or "").replace(" ", "").lower()
    if not (SHIPPED / f"{card}.json").is_file():
        return None
    facts = read_machine(card)
    if not facts.has_memory(memory_bytes) or not all(speed.is_timed for speed in facts.speeds):
        return None
    return facts.model_copy(update={"cores": cores, "source": f"shipped facts of this card, {facts.source}"})

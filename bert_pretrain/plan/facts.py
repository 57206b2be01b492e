"""What a plan is made from: what a corpus is like, and how long a step of training takes on a machine.

Facts of a corpus come from a bounded sample. Those of a machine are a JSON file: some are shipped (`machines/`), and
`timing.py` measures this one.
"""

import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from bert_pretrain.config import DataConfig, ModelConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.make_data.estimate import MIN_SOURCES, sample_source
from bert_pretrain.text import documents
from bert_pretrain.text.languages import MIN_CHINESE_SHARE, count_letters, with_language
from bert_pretrain.text.sentences import SentenceSplitter
from bert_pretrain.text.sources import MAX_SAMPLED_SOURCES, MIN_CORPUS_DOCUMENTS, Source, examined, resolve
from bert_pretrain.train.flops import known_card, training_flops

SAMPLE_BYTES = 4 << 20
TOKENS_PER_BYTE = {False: 0.24, True: 0.30}  # by whether the text is Chinese; the corpora of RESULTS.md
MASKED_SHARE = 0.3  # of the tokens, in timed steps and in plans
SHIPPED = Path(__file__).with_name("machines")
BYTES_PER_WEIGHT = 24  # in training: weights, gradients, moments, and casts of them


@dataclass(frozen=True)
class TextFacts:
    """A corpus; what the sample does not tell exactly is estimated from it."""

    num_bytes: float  # of the text, uncompressed
    documents: float
    sentences_per_document: float  # median over the documents of the sample
    single_sentence_share: float  # share of the documents that are one sentence, too short for a pair
    cjk_share: float  # of the letters; CJK means Chinese characters here, in any language
    is_divisible: bool  # whether a fraction can be read: many files, or a few of several documents each
    vocab_reads_all: bool = False  # `vocab` reads a few inputs whole that are compressed, or not in UTF-8
    boundary: str = ""  # what ends documents, where the configured one would make fewer than `MIN_CORPUS_DOCUMENTS`
    documents_as_configured: float = 0.0  # then, how many
    language: str = "en"

    @property
    def is_chinese(self) -> bool:
        return self.cjk_share > MIN_CHINESE_SHARE

    @property
    def tokens(self) -> float:
        return self.num_bytes * TOKENS_PER_BYTE[self.is_chinese]


def measure_text(inputs: Sequence[str], config: DataConfig) -> TextFacts:
    """Read a sample of a corpus; where it is few documents and the boundary is `auto`, look for one that makes more."""
    sources = [source for source in resolve(inputs, config, looks=False) if not source.is_validation]
    config = with_language(config, _sample(sources))
    facts = _measure(sources, config)
    if config.document_boundary != "auto" or all(source.format != "txt" for source in sources):
        return facts
    for boundary in ("blank_line", "line") if facts.documents < MIN_CORPUS_DOCUMENTS else ():
        other = config.model_copy(update={"document_boundary": boundary})
        found = _measure([replace(source, boundary=boundary) for source in sources], other)
        # A line of one sentence may be all of a document, or hard-wrapped: that cannot be told.
        if found.documents >= MIN_CORPUS_DOCUMENTS and (boundary != "line" or found.sentences_per_document >= 2):
            return replace(found, boundary=boundary, documents_as_configured=facts.documents)
    return facts


def _measure(sources: Sequence[Source], config: DataConfig) -> TextFacts:
    chosen = [examined(source, config) for source in _sample(sources)]
    others = sum(source.size or 0 for source in sources) / max(1, sum(source.size or 0 for source in chosen)) or 1.0
    sentences: list[float] = []  # of each document
    num_bytes = num_documents = 0.0
    letters = cjk = 0
    with tempfile.TemporaryDirectory() as name:
        for number, source in enumerate(chosen):
            path = Path(name) / f"{number}.txt"
            part, share = sample_source(source, path, SAMPLE_BYTES // len(chosen), config)
            splitter = SentenceSplitter(source.splitter, config.language)
            own = [0]
            for document in documents.read(part, config, Counter()):
                counted = count_letters(document.text)
                cjk, letters = cjk + counted[0], letters + counted[1]
                own[-1] += sum(1 for _ in splitter.split(document.text, ends_document=document.ends_document))
                if document.ends_document and own[-1]:
                    own.append(0)
            own = [count for count in own if count]
            num_bytes += path.stat().st_size / share
            is_part = source.boundary == "file"  # the sample is a part of one document
            num_documents += len(own) / (1.0 if is_part else share)
            sentences += [round(count / share) for count in own] if is_part else own
    if not sentences:
        raise InputError("the inputs hold no text", where=sources[0].location, remedy="give files with text in them")
    return TextFacts(
        num_bytes=num_bytes * others,
        documents=num_documents * others,
        sentences_per_document=statistics.median(sentences),
        single_sentence_share=sum(number == 1 for number in sentences) / len(sentences),
        cjk_share=cjk / max(1, letters),
        language=config.language,
        is_divisible=len(sources) > MAX_SAMPLED_SOURCES or all(source.has_documents_at_lines for source in chosen),
        vocab_reads_all=len(sources) <= MAX_SAMPLED_SOURCES and any(source.needs_decoding for source in chosen),
    )


def _sample(sources: Sequence[Source]) -> list[Source]:
    """Return some sources at equal distances, of up to `MAX_SAMPLED_SOURCES` all."""
    return [sources[place] for place in np.unique(np.linspace(0, len(sources) - 1, MIN_SOURCES).astype(int))]


class Size(NamedTuple):
    """Layers and width of a network; heads are 64 wide, the feed-forward layer four times as wide as the rest."""

    layers: int
    hidden: int

    def __str__(self) -> str:
        return f"L{self.layers}-H{self.hidden}"

    @property
    def weights(self) -> int:
        """Weights of the matrices inside the encoder."""
        return 12 * self.layers * self.hidden**2

    def model_config(self, length: int) -> ModelConfig:
        """Return the network of this size, without dropout."""
        return ModelConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            intermediate_size=4 * self.hidden,
            max_position_embeddings=length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )

    def flops_per_token(self, vocab_size: int, length: int) -> float:
        """Return the floating-point operations of a token of training, forward and backward."""
        return training_flops(self.model_config(length), vocab_size, 1.0, length, MASKED_SHARE)


# BERT-Tiny to BERT-Large, and one size between the smallest two of Turc et al. (2019).
SIZES = tuple(map(Size._make, ((2, 128), (2, 256), (4, 256), (4, 512), (8, 512), (12, 768), (24, 1024))))

_Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
_NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Speed(_Facts):
    """How fast a network of some size is trained."""

    layers: PositiveInt
    hidden: Annotated[int, Field(gt=0, multiple_of=64)]
    flops_per_second: _Positive  # forward and backward, with large batches
    update_seconds: _NonNegative  # of the optimizers, per step
    launch_seconds: _NonNegative = 0.0  # shortest possible step: the host launches kernels one by one; about 0 on a CPU
    is_timed: bool = True  # False: extrapolated

    @property
    def size(self) -> Size:
        return Size(self.layers, self.hidden)

    def seconds(self, flops: float) -> float:
        """Return the time of a step from its number of floating-point operations."""
        return max(self.launch_seconds, flops / self.flops_per_second + self.update_seconds)


class MachineFacts(_Facts):
    """How fast a machine trains, as a JSON file says it."""

    version: Literal[1] = 1
    name: str = "this machine"
    source: str = "measured"
    device: Literal["cpu", "cuda"] = "cpu"
    cores: PositiveInt  # of the host, for vocabulary and data
    memory_bytes: PositiveInt  # of the device
    speeds: Annotated[tuple[Speed, ...], Field(min_length=1)]

    def speed(self, size: Size) -> Speed:
        """Return the speed of a network."""
        return next(speed for speed in self.speeds if speed.size == size)

    def has_memory(self, memory_bytes: int) -> bool:
        """Whether so much memory is that of the device, which drivers say a little differently."""
        return abs(self.memory_bytes - memory_bytes) < 0.1 * memory_bytes

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Networks that fit into memory, the smallest first."""
        fitting = [one.size for one in self.speeds if BYTES_PER_WEIGHT * one.size.weights < self.memory_bytes]
        return tuple(sorted(fitting or [self.speeds[0].size], key=lambda size: size.weights))

    def tokens_per_second(self, size: Size, vocab_size: int, length: int, batch_tokens: int) -> float:
        """Return the speed of training in batches of `batch_tokens` tokens, without evaluations and checkpoints."""
        flops = batch_tokens * size.flops_per_token(vocab_size, length)
        return batch_tokens / self.speed(size).seconds(flops)


def read_machine(name_or_file: str) -> MachineFacts:
    """Return the facts of a shipped machine, or of a JSON file."""
    path = SHIPPED / f"{name_or_file}.json"
    if not path.is_file():
        path = Path(name_or_file)
    try:
        return MachineFacts.model_validate_json(path.read_bytes())
    except OSError:
        known = ", ".join(sorted(shipped.stem for shipped in SHIPPED.glob("*.json")))
        what, remedy = f"there is no machine '{name_or_file}'", f"choose {known}, or a machine.json of 'run auto'"
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{path} is not a file of machine facts: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        remedy = "write it by 'run auto', which keeps OUTPUT/machine.json"
    raise ConfigError(what, where="--machine", remedy=remedy)


def shipped_facts(device_name: str, memory_bytes: int, cores: int) -> MachineFacts | None:
    """Return the shipped facts of a card, by PyTorch's name of it and its memory, if all of its networks were timed."""
    card = (known_card(device_name) or "").replace(" ", "").lower()
    if not (SHIPPED / f"{card}.json").is_file():
        return None
    facts = read_machine(card)
    if not facts.has_memory(memory_bytes) or not all(speed.is_timed for speed in facts.speeds):
        return None
    return facts.model_copy(update={"cores": cores, "source": f"shipped facts of this card, {facts.source}"})

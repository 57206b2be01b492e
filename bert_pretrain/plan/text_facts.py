"""What a corpus is like, from a bounded sample: its size, script, documents and sentences."""

import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.make_data.estimate import MIN_SOURCES, sample_source
from bert_pretrain.text import documents
from bert_pretrain.text.sentences import CHINESE_FROM, SentenceSplitter, count_letters
from bert_pretrain.text.sources import FEW_DOCUMENTS, FEW_SOURCES, Source, examined, resolve

SAMPLE_BYTES = 4 << 20
TOKENS_PER_BYTE = {False: 0.24, True: 0.30}  # by whether the text is Chinese; the corpora of RESULTS.md


@dataclass(frozen=True)
class TextFacts:
    """A corpus; what the sample does not tell exactly is estimated from it."""

    num_bytes: float
    """Of the text, uncompressed."""
    documents: float
    sentences_per_document: float
    """Median over the documents of the sample."""
    single_sentence_share: float
    """Share of the documents that are one sentence, of which no pair can be made."""
    cjk_share: float
    """Of the letters; CJK means Chinese characters here, in whatever language."""
    is_divisible: bool
    """Whether a fraction of it can be read: many files, or a few of several documents each."""
    vocab_reads_all: bool = False
    """Whether `vocab` reads all of it even for a fraction: a few inputs that are compressed, or not in UTF-8."""
    boundary: str = ""
    """What ends documents, where it is not as the configuration says: it would make fewer than `FEW_DOCUMENTS`."""
    documents_as_configured: float = 0.0
    """Then, how many."""

    @property
    def is_chinese(self) -> bool:
        return self.cjk_share > CHINESE_FROM

    @property
    def tokens(self) -> float:
        return self.num_bytes * TOKENS_PER_BYTE[self.is_chinese]


def measure_text(inputs: Sequence[str], config: DataConfig) -> TextFacts:
    """Read a sample of a corpus; where it is few documents and the boundary is `auto`, look for one that makes more."""
    sources = [source for source in resolve(inputs, config) if not source.is_validation]
    facts = _measure(sources, config)
    if config.document_boundary != "auto" or all(source.format != "txt" for source in sources):
        return facts
    for boundary in ("blank_line", "line") if facts.documents < FEW_DOCUMENTS else ():
        other = config.model_copy(update={"document_boundary": boundary})
        found = _measure([examined(replace(source, boundary=boundary), other) for source in sources], other)
        # A line of one sentence may be all of a document, or hard-wrapped: that cannot be told.
        if found.documents >= FEW_DOCUMENTS and (boundary != "line" or found.sentences_per_document >= 2):
            return replace(found, boundary=boundary, documents_as_configured=facts.documents)
    return facts


def _measure(sources: Sequence[Source], config: DataConfig) -> TextFacts:
    chosen = [sources[index] for index in np.unique(np.linspace(0, len(sources) - 1, MIN_SOURCES).astype(int))]
    others = sum(source.size or 0 for source in sources) / max(1, sum(source.size or 0 for source in chosen)) or 1.0
    sample = _Sample()
    num_bytes = num_documents = 0.0
    with tempfile.TemporaryDirectory() as name:
        for number, source in enumerate(chosen):
            path = Path(name) / f"{number}.txt"
            part, share = sample_source(source, path, SAMPLE_BYTES // len(chosen), config)
            before = len(sample.sentences)
            sample.add(documents.read(part, config, Counter()), source, config)
            num_bytes += path.stat().st_size / share
            if source.boundary == "file":  # of which the sample is a part
                sample.sentences[before:] = [round(number / share) for number in sample.sentences[before:]]
                num_documents += len(sample.sentences) - before
            else:
                num_documents += (len(sample.sentences) - before) / share
    if not sample.sentences:
        raise InputError("the inputs hold no text", where=sources[0].location, remedy="give files with text in them")
    return TextFacts(
        num_bytes=num_bytes * others,
        documents=num_documents * others,
        sentences_per_document=statistics.median(sample.sentences),
        single_sentence_share=sum(number == 1 for number in sample.sentences) / len(sample.sentences),
        cjk_share=sample.cjk / max(1, sample.letters),
        is_divisible=len(sources) > FEW_SOURCES or all(source.has_documents_at_lines for source in sources),
        vocab_reads_all=len(sources) <= FEW_SOURCES and any(source.needs_decoding for source in sources),
    )


class _Sample:
    """Counts over the documents of a sample."""

    def __init__(self) -> None:
        self.letters = self.cjk = 0
        self.sentences: list[int] = []

    def add(self, found: Iterable[documents.Document], source: Source, config: DataConfig) -> None:
        """Count the documents of one source."""
        splitter = SentenceSplitter(source.splitter, config.language)
        in_document = 0
        for document in found:
            cjk, letters = count_letters(document.text)
            self.cjk, self.letters = self.cjk + cjk, self.letters + letters
            in_document += sum(1 for _ in splitter.split(document.text, ends_document=document.ends_document))
            if document.ends_document and in_document:
                self.sentences.append(in_document)
                in_document = 0
        if in_document:
            self.sentences.append(in_document)

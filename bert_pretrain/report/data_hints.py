"""Hints from the statistics of the data alone: what makes an objective hard or impossible to learn."""

from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_UNK_SHARE = 0.05
"""Of tokens, above which something is likely wrong."""
MAX_REPEATED_SHARE = 0.05
"""Of tokens; books and articles have less than 0.1 %."""
SENTENCE_TOKENS = (4.0, 120.0)
"""The mean length of a sentence; books and articles have 20 to 40 tokens."""
MAX_SENTENCES_PER_DOCUMENT = 20_000
"""On average; a long novel has so many."""


class Hint(NamedTuple):
    """A cause, what tells it, and its remedy."""

    cause: str
    """A run gives one hint of each."""
    observed: str
    remedy: str

    def __str__(self) -> str:
        return f"hint: {self.cause} ({self.observed}): {self.remedy}"


def data_statistics(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what hints need of a data folder's manifest, as JSON values; a folder of an older version has less."""
    names = ("documents", "sentences", "tokens", "unk_share", "repeated_share", "median_sentences_per_document")
    corpus = manifest.get("corpus", {})
    return {
        "next_sentence": manifest["config"]["data"].get("next_sentence", "nsp"),
        "language": manifest["config"]["data"].get("language", "en"),
        "vocab_size": (manifest.get("tokenizer") or {}).get("vocab_size"),
        "corpus": {name: corpus[name] for name in names if name in corpus},
        "unigram_entropy": {
            name: split.get("statistics", {}).get("unigram_entropy") for name, split in manifest["splits"].items()
        },
    }


def data_hints(statistics: Mapping[str, Any]) -> list[Hint]:
    """Return the hints of the statistics that `data_statistics` gave."""
    corpus = statistics.get("corpus") or {}
    found = []
    if (share := corpus.get("unk_share", 0.0)) > MAX_UNK_SHARE:
        observed = f"{share:.0%} of the tokens are [UNK]"
        remedy = "make the vocabulary from this text, in this language and casing"
        found.append(Hint("unknown tokens", observed, remedy))
    if (share := corpus.get("repeated_share", 0.0)) > MAX_REPEATED_SHARE:
        observed = f"{share:.0%} of the tokens are in sentences that recur"
        found.append(Hint("repeated lines", observed, "remove navigation, licences and the like from the text"))
    documents, sentences, tokens = (corpus.get(name, 0) for name in ("documents", "sentences", "tokens"))
    has_pairs = statistics.get("next_sentence") != "none"  # without them, sentences matter little
    if has_pairs and sentences and tokens and not SENTENCE_TOKENS[0] <= tokens / sentences <= SENTENCE_TOKENS[1]:
        observed = f"a sentence has {tokens / sentences:.1f} tokens on average"
        remedy = "set data.sentence_splitter and data.language as the text needs"
        found.append(Hint("wrong sentence boundaries", observed, remedy))
    median = corpus.get("median_sentences_per_document")
    if documents and median is not None and statistics.get("next_sentence") == "nsp":
        found += _next_sentence_hints(sentences / documents, median)
    return found


def _next_sentence_hints(mean: float, median: float) -> list[Hint]:
    if median < 2:
        observed = f"the median is {median:g}; single sentences give no pairs"
        remedy = "join related lines to documents (data.document_boundary), or set data.next_sentence=none"
        return [Hint("documents of one sentence", observed, remedy)]
    if mean > MAX_SENTENCES_PER_DOCUMENT:
        observed = f"a document has {mean:,.0f} sentences on average"
        remedy = "put a blank line between documents and set data.document_boundary=blank_line"
        return [Hint("no document boundaries", observed, remedy)]
    return []

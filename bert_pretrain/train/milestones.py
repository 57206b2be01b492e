"""Milestones: how many words of training text a run has seen, and what a number of them is called.

A word is what white space separates in the raw text. Examples consist of tokens, so words are converted: by the words
per token of the corpus, which `make-data` has counted.
"""

from bert_pretrain.config_values import UNITS
from bert_pretrain.errors import DataError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.storage.manifest import MANIFEST

FOLDER = "milestones"


def words_seen(data: DataFolder, examples: float, tokens: float) -> float:
    """Return how many words so many examples of a data folder hold, counted as often as they occur.

    Args:
        data: the data folder.
        examples: number of them.
        tokens: of all of them, [CLS] and [SEP] included.

    Raises:
        DataError: when the manifest has no count of words.
    """
    corpus = data.manifest.get("corpus", {})
    if not corpus.get("words"):
        raise DataError(
            "train.milestones are counted in words, and this data was made before make-data counted words",
            where=str(data.path / MANIFEST),
            remedy="make the data again with --overwrite, or leave train.milestones out",
        )
    special = 2 if data.config.next_sentence == "none" else 3  # [CLS] A [SEP] or [CLS] A [SEP] B [SEP]
    return float((tokens - special * examples) * corpus["words"] / corpus["tokens"])


def name_of(words: int) -> str:
    """Return the name of a milestone, such as `1M`, `2.5M` or `1234567`: the largest unit that is exact."""
    for unit, size in reversed(UNITS.items()):
        text = f"{words / size:g}"
        if words >= size and round(float(text) * size) == words:
            return text + unit
    return str(words)

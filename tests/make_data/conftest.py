"""A corpus in which every word is one token and occurs once, so an example shows its place in the corpus."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bert_pretrain.config import Config
from bert_pretrain.config_file import load_config
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.wordpiece import special_tokens

NUM_RESERVED = len(special_tokens(9))
SMALL = ("data.max_seq_length=32", "data.dupe_factor=2", "data.examples_per_shard=64", "data.validation_fraction=0.1")


@dataclass(frozen=True)
class Pair:
    """An unmasked example: the numbers of the words of A and B in the corpus."""

    a: np.ndarray
    b: np.ndarray
    label: int


@dataclass(frozen=True)
class Numbered:
    """The corpus, and the document and sentence boundaries of its words."""

    folder: Path
    document: np.ndarray  # (words,): the document of each word
    begins: np.ndarray  # (words,) bool: whether a sentence begins there
    ends: np.ndarray  # (words,) bool: whether it is the last word of its sentence
    splitter: str

    @property
    def text(self) -> Path:
        return self.folder / "text.txt"

    @property
    def vocab(self) -> Path:
        return self.folder / "vocab"

    def config(self, *settings: str) -> Config:
        always = ["data.document_boundary=blank_line", f"data.sentence_splitter={self.splitter}"]
        return load_config(settings=[*always, *settings])

    def make(self, *settings: str, name: str = "data", workers: int = 1, verify: bool = False) -> Path:
        config, inputs = self.config(*settings), [str(self.text)]
        return make_data(config, inputs, self.vocab, self.folder / name, workers=workers, verify=verify)

    def pairs(self, data: Path, split: str) -> list[Pair]:
        return [pair for table in tables(data, split) for pair in unmasked(table)]


def tables(data: Path, split: str) -> list[Examples]:
    return [read_shard(data, record) for record in DataFolder.open(data).shards(split)]


def unmasked(examples: Examples) -> Iterator[Pair]:
    numbers = examples.original_ids.astype(np.int64) - NUM_RESERVED
    for row in range(len(examples)):
        example = numbers[examples.offsets[row] : examples.offsets[row + 1]]
        b_start = int(examples.segment_b_start[row])
        yield Pair(example[1 : b_start - 1], example[b_start:-1], int(examples.next_sentence_label[row]))


def label_from_shape(corpus: Numbered, pairs: list[Pair]) -> float:
    """Return the balanced accuracy of a classifier on lengths and on whether segments start and end with a sentence."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import GroupKFold, cross_val_score
    from threadpoolctl import threadpool_limits

    sizes = np.array([(len(pair.a), len(pair.b), len(pair.a) + len(pair.b)) for pair in pairs])
    firsts, lasts = (np.array([(pair.a[at], pair.b[at]) for pair in pairs]) for at in (0, -1))
    columns = np.hstack([sizes, corpus.begins[firsts], corpus.ends[lasts]])
    labels, places = np.array([pair.label for pair in pairs]), firsts[:, 0]
    # Documents, or stretches of one, are held out: the classifier must not see another copy of a test example.
    groups = corpus.document[places] if len(set(corpus.document[places])) > 50 else places // 500
    classifier = HistGradientBoostingClassifier(max_iter=30, random_state=0)
    with threadpool_limits(1):
        scores = cross_val_score(
            classifier, columns, labels, groups=groups, cv=GroupKFold(4), scoring="balanced_accuracy"
        )
    return float(scores.mean())


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Numbered]:
    """Return a function that writes a corpus of documents given as lists of sentence lengths."""

    def write(documents: list[list[int]], *, is_lines: bool = True) -> Numbered:
        folder = tmp_path_factory.mktemp("numbered")
        lengths = np.array([length for document in documents for length in document])
        words = [f"w{number}" for number in range(int(lengths.sum()))]
        source, separator = iter(words), "\n" if is_lines else " "
        texts = (
            separator.join(" ".join(next(source) for _ in range(length)) for length in document)
            for document in documents
        )
        (folder / "text.txt").write_text("\n\n".join(texts) + "\n")
        tokenizer = Tokenizer(
            [*special_tokens(9), *words], lowercase=True, strip_accents=None, handle_chinese_chars=True
        )
        tokenizer.save(folder / "vocab")
        ends = np.zeros(len(words), dtype=bool)
        ends[np.cumsum(lengths) - 1] = True
        document = np.repeat(np.arange(len(documents)), [sum(document) for document in documents])
        return Numbered(folder, document, np.roll(ends, 1), ends, "lines" if is_lines else "sentencex")

    return write


@pytest.fixture(scope="session")
def small(numbered: Callable[..., Numbered]) -> Numbered:
    """Sixty documents. Tests must not damage their token store; use `numbered` for that."""
    from .test_pairs import documents_of

    return numbered(documents_of(30, 60, (2, 20), (3, 15)))

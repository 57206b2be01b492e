"""Run vocabulary and data stage on real corpora and hold the outcome against what is promised; prints a table.

For every file: the ids of all its sentences against `transformers`, the statistics of the manifest, whether
`datasets` opens the shards, and how well the form of a pair tells its label.

    python scripts/check_corpora.py OUTPUT FILE[:LANGUAGE] ...
"""

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import cross_val_score
from transformers import AutoTokenizer

from bert_pretrain.config import Config
from bert_pretrain.config_file import load_config
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.make_data.run import make_data
from bert_pretrain.make_data.sentences import SentenceSplitter
from bert_pretrain.storage.files import read_json
from bert_pretrain.text import documents, text_files
from bert_pretrain.text.encoder import Encoder
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.run import make_vocab

SENTENCE_ENDS = ".!?。！？…;；:：\"'”’」』)）"


def main() -> None:
    output = Path(sys.argv[1])
    rows = [check(output, *split_argument(argument)) for argument in sys.argv[2:]]
    print("\n| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


def split_argument(argument: str) -> tuple[str, str]:
    path, _, language = argument.partition(":")
    return path, language or "en"


def check(output: Path, path: str, language: str) -> dict[str, Any]:
    folder = output / Path(path).name
    size = "21128" if language == "zh" else "30522"
    config = load_config(settings=[f"vocab.size={size}", f"data.language={language}"])
    begin = time.perf_counter()
    vocab = make_vocab(config, [path], folder / "vocab")
    middle = time.perf_counter()
    data = make_data(config, [path], vocab, folder / "data")
    end = time.perf_counter()
    manifest, figures = read_json(data / "manifest.json"), read_json(vocab / "manifest.json")["figures"]
    train = manifest["splits"]["train"]
    num_compared, num_different = compare_ids(path, vocab, config)
    loaded = datasets.load_dataset(str(data), cache_dir=str(folder / "cache"))
    assert {name: split.num_rows for name, split in loaded.items()} == {
        name: split["rows"] for name, split in manifest["splits"].items()
    }
    shares = train["statistics"]
    return {
        "corpus": Path(path).name,
        "documents": f"{manifest['corpus']['documents']:,}",
        "sentences": f"{manifest['corpus']['sentences']:,}",
        "vocabulary": f"{manifest['tokenizer']['vocab_size']:,}",
        "[UNK] of held-out words": f"{figures['unk_share_of_words']:.3%}",
        "pieces a word": f"{figures['pieces_per_word']:.3f}",
        "sentences with other ids than transformers": f"{num_different} of {num_compared:,}",
        "training examples": f"{train['rows']:,}",
        "is-next": f"{shares['is_next_share']:.2%}",
        "masked": f"{shares['masked_share']:.2%}",
        "80/10/10": "/".join(
            f"{100 * shares[f'masked_shown_as_{kind}_share']:.1f}" for kind in ("mask", "random", "original")
        ),
        "label from form": f"{label_from_form(data):.1%}",
        "vocab s": f"{middle - begin:.1f}",
        "make-data s": f"{end - middle:.1f}",
    }


def compare_ids(path: str, vocab: Path, config: Config) -> tuple[int, int]:
    """Return how many sentences were compared with transformers, and how many have other ids there."""
    reference = AutoTokenizer.from_pretrained(str(vocab), split_special_tokens=True)
    encoder = Encoder(Tokenizer.load(vocab))
    compared = different = 0
    for source in resolve([path], config.data):
        splitter = SentenceSplitter(source.splitter, config.data.language)
        for document in documents.read(text_files.ByteRange(source), config.data, Counter()):
            found = splitter.split(document.text, ends_document=document.ends_document)
            if not found:
                continue
            content = "\n".join(found).encode()
            buffer = np.frombuffer(content, dtype=np.uint8)
            starts = np.concatenate([[0], np.flatnonzero(buffer == ord("\n")) + 1])
            ids, offsets = encoder.encode(buffer, starts)
            expected = reference(found, add_special_tokens=False)["input_ids"]
            compared += len(found)
            different += sum(
                ids[begin:end].tolist() != one
                for begin, end, one in zip(offsets[:-1], offsets[1:], expected, strict=True)
            )
    return compared, different


def label_from_form(data: Path) -> float:
    """Return the balanced accuracy with which lengths and boundary marks tell the label, by cross-validation."""
    folder = DataFolder.open(data)
    tokenizer = folder.tokenizer()
    ends = np.array([token.removeprefix("##") in SENTENCE_ENDS for token in tokenizer.tokens])
    continues = tokenizer.is_subword
    features, labels = [], []
    for record in folder.shards("train"):
        examples = read_shard(data, record)
        ids, masks = examples.input_ids.copy(), examples.masks
        assert masks is not None
        assert examples.next_sentence_label is not None
        ids[masks.positions + np.repeat(examples.offsets[:-1], np.diff(masks.offsets))] = masks.original_ids
        first, last = examples.offsets[:-1], examples.offsets[1:]
        second = first + examples.segment_b_start
        lengths = [second - first - 2, last - second - 1, last - first]
        marks = [ends[ids[second - 2]], ends[ids[last - 2]], continues[ids[first + 1]], continues[ids[second]]]
        features.append(np.stack([*lengths, *marks], axis=1))
        labels.append(examples.next_sentence_label)
    classifier = HistGradientBoostingClassifier(random_state=0)
    scores = cross_val_score(
        classifier, np.concatenate(features), np.concatenate(labels), cv=4, scoring="balanced_accuracy"
    )
    return float(scores.mean())


if __name__ == "__main__":
    main()

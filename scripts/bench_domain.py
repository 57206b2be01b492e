"""Continue a BERT on a domain, with its own vocabulary and with an extended one, and compare losses.

Every twentieth document of the domain is held out before anything is counted. Losses per masked token are those of
`evaluate`. They are not comparable between vocabularies, since the tokens differ. So the same words in the same windows
of held-out text are also masked whole; the loss of a word, the sum over its tokens, is reported per word and per byte.

    python scripts/bench_domain.py --base run/model --domain data/pydoc.jsonl --work runs/domain
    python scripts/bench_domain.py --general general.txt --domain data/pydoc.jsonl --work runs/domain
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_pretrain.config import Config
from bert_pretrain.config_file import load_config
from bert_pretrain.make_data.run import make_data
from bert_pretrain.rng import stream
from bert_pretrain.storage.files import write_json, write_text
from bert_pretrain.storage.manifest import read_manifest
from bert_pretrain.text import documents, text_files
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.inference import open_bert
from bert_pretrain.train.evaluation import evaluate
from bert_pretrain.train.run import train
from bert_pretrain.vocab.run import make_vocab

HELD_OUT_EVERY = 20
MASKED_SHARE = 0.15
MAX_WINDOWS = 2000
_ROOM = 8  # an extended vocabulary may, rarely, split a word into more tokens than before


@dataclass(frozen=True)
class Window:
    """Consecutive held-out words, and the indices of the masked ones."""

    words: list[str]
    masked: list[int]


def main() -> None:
    options = _options()
    work: Path = options.work
    config = _config(options)
    domain, held_out = _split(options.domain, work, config)
    base = options.base or _make_base(options.general, work / "base", config, options)
    old = Tokenizer.load(base, "--base")
    extended = work / "vocab-extended"
    extending = load_config(settings=[f"vocab.add_tokens={options.add_tokens}"] if options.add_tokens else [])
    make_vocab(extending, [str(domain)], extended, extend=base)
    held_out_data = {"data": config.data.model_copy(update={"validation": (str(held_out),)})}
    data: dict[str, Path] = {}
    models: dict[str, Path] = {"before": base}
    for name, vocab in (("own", base), ("extended", extended)):
        data[name] = make_data(config.model_copy(update=held_out_data), [str(domain)], vocab, work / f"data-{name}")
        models[name] = train(config, data[name], work / f"run-{name}", init_from=base)
    windows = list(_cut_windows(held_out, old, Tokenizer.load(extended), options.length))
    new_words = {token["token"] for token in read_manifest(extended, "vocab", "--work")["figures"]["added"]}
    rows = {name: _measure(path, windows, new_words, config) for name, path in models.items()}
    for name, path in models.items():
        on = data["own" if name == "before" else name]
        rows[name]["nats_per_masked_token"] = evaluate(path, on, config=config.train)["mlm_loss"]
    write_json(work / "domain.json", {"base": str(base), "steps": options.steps, "rows": rows})
    print(_table(rows, len(windows), options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--base", type=Path, help="the BERT folder to continue")
    start.add_argument("--general", type=Path, help="text to pretrain a tiny BERT on first")
    parser.add_argument("--domain", type=Path, required=True, help="the domain's text, any input of make-data")
    parser.add_argument(
        "--work", type=Path, required=True, help="where everything is written; the same command continues"
    )
    parser.add_argument("--steps", type=int, default=600, help="steps of each continued training")
    parser.add_argument("--base-steps", type=int, default=2000, help="steps of pretraining, with --general")
    parser.add_argument("--length", type=int, default=64, help="maximum tokens per example")
    parser.add_argument("--batch", type=int, default=64, help="examples per step")
    parser.add_argument("--peak-lr", type=float, default=1e-3)
    parser.add_argument("--add-tokens", type=int, help="default: the number of unused slots")
    return parser.parse_args()


def _config(options: argparse.Namespace) -> Config:
    settings = {
        "data.max_seq_length": options.length,
        "data.dupe_factor": 5,
        "train.global_batch_size": options.batch,
        "train.max_steps": options.steps,
        "train.peak_lr": options.peak_lr,
        "train.warmup_ratio": 0.1,
        "train.eval_every": max(1, options.steps // 4),
        "train.save_every": max(1, options.steps // 4),
        "train.log_every": max(1, options.steps // 20),
    }
    return load_config(settings=[f"{key}={value}" for key, value in settings.items()])


def _texts(path: Path, config: Config) -> Iterator[str]:
    """Yield the documents of an input."""
    (source,) = resolve([str(path)], config.data)
    lines: list[str] = []
    for document in documents.read(text_files.ByteRange(source), config.data, Counter()):
        lines.append(document.text)
        if document.ends_document:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def _split(domain: Path, work: Path, config: Config) -> tuple[Path, Path]:
    """Write training and held-out documents as JSON lines, and return both files."""
    kept: dict[bool, list[str]] = {False: [], True: []}
    for number, text in enumerate(_texts(domain, config)):
        kept[number % HELD_OUT_EVERY == 0].append(json.dumps({"text": text}, ensure_ascii=False))
    paths = (work / "domain.jsonl", work / "held-out.jsonl")
    for path, is_held_out in zip(paths, (False, True), strict=True):
        content = "\n".join(kept[is_held_out]) + "\n"
        if (
            not path.exists() or path.read_text(encoding="utf-8") != content
        ):  # `make-data` compares the modification time
            write_text(path, content)
    return paths


def _make_base(general: Path, folder: Path, config: Config, options: argparse.Namespace) -> Path:
    tiny = load_config("tiny,paper")
    vocab = make_vocab(load_config(settings=["vocab.size=8192"]), [str(general)], folder / "vocab")
    data = make_data(config, [str(general)], vocab, folder / "data")
    longer = config.train.model_copy(update={"max_steps": options.base_steps})
    return train(tiny.model_copy(update={"train": longer}), data, folder / "run")


def _cut_windows(held_out: Path, old: Tokenizer, new: Tokenizer, length: int) -> Iterator[Window]:
    """Cut held-out documents into windows of words that fit, and choose the words to mask, none of them [UNK]."""
    rng = stream(0, "masked words")
    number = 0
    for line in held_out.read_text(encoding="utf-8").splitlines():
        normalised = old.backend.normalizer.normalize_str(json.loads(line)["text"])
        words = [word for word, _ in old.backend.pre_tokenizer.pre_tokenize_str(normalised)]
        sizes = [max(len(old.encode_text(word)), len(new.encode_text(word))) for word in words]
        begin = 0
        while begin < len(words) and number < MAX_WINDOWS:
            end = begin + max(1, int(np.searchsorted(np.cumsum(sizes[begin:]), length - 2 - _ROOM, side="right")))
            window = words[begin:end]
            known = [index for index, word in enumerate(window) if old.unk_id not in old.encode_text(word)]
            wanted = round(MASKED_SHARE * len(window))
            if 0 < wanted <= len(known):
                yield Window(window, sorted(rng.choice(known, wanted, replace=False).tolist()))
                number += 1
            begin = end


def _measure(model: Path, windows: list[Window], new_words: set[str], config: Config) -> dict[str, Any]:
    """Return mean losses of masked words: of all, and of those that are one new token of the extended vocabulary."""
    bert = open_bert(model, config.train, ("cls.predictions",))
    tokenizer = bert.tokenizer
    costs: list[tuple[str, float]] = []
    for window in windows:
        pieces = [tokenizer.encode_text(word) for word in window.words]
        offsets = np.cumsum([1, *map(len, pieces)])  # [CLS] is first
        ids = bert.add_special_tokens(np.array([piece for word in pieces for piece in word]))
        positions = [np.arange(offsets[word], offsets[word + 1]) for word in window.masked]
        flat = np.concatenate(positions)
        labels = torch.from_numpy(ids[flat]).to(bert.device)
        ids[flat] = tokenizer.mask_id
        with bert.running():
            features, _ = bert.network(*bert.pack([ids]), torch.from_numpy(flat).to(bert.device))
            shares = bert.network.decode(features).float().log_softmax(dim=1)
            losses = -shares.gather(1, labels[:, None])[:, 0].double().cpu().numpy()
        bounds = np.cumsum([0, *map(len, positions)])
        costs += [
            (window.words[word], float(losses[bounds[rank] : bounds[rank + 1]].sum()))
            for rank, word in enumerate(window.masked)
        ]
    return {
        **_means("word", costs),
        **_means("new_word", [(word, cost) for word, cost in costs if word in new_words]),
    }


def _means(name: str, costs: list[tuple[str, float]]) -> dict[str, float | None]:
    total, size = sum(cost for _, cost in costs), sum(len(word.encode()) for word, _ in costs)
    return {
        f"{name}s": len(costs),
        f"nats_per_{name}": total / len(costs) if costs else None,
        f"nats_per_byte_of_{name}": total / size if costs else None,
    }


def _table(rows: dict[str, dict[str, Any]], num_windows: int, options: argparse.Namespace) -> str:
    names = {
        "before": "before",
        "own": f"after {options.steps} steps, own vocabulary",
        "extended": f"after {options.steps} steps, extended vocabulary",
    }
    keys = ("nats_per_masked_token", "nats_per_word", "nats_per_byte_of_word", "nats_per_new_word")
    lines = [
        "| | per masked token* | per masked word | per byte of a masked word | per word that became a token |",
        "|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = ("–" if row[key] is None else f"{row[key]:.3f}" for key in keys)
        lines.append(f"| {names[name]} | {' | '.join(cells)} |")
    words, new = rows["before"]["words"], rows["before"]["new_words"]
    return "\n".join(
        [
            f"\nheld out: {num_windows:,} windows of text, {words:,} masked words, {new:,} of them new tokens; nats",
            *lines,
            "* of its own vocabulary; not comparable between vocabularies",
        ]
    )


if __name__ == "__main__":
    main()

"""Which recipe learns most? Trains variants from several seeds, and scores all of them by one independent scorer.

The corpus (a sentence a line, blank lines between documents) is split by document: 1 % to choose by (`dev`), 2 % for
the final metrics (`test`), which is scored only with `--split test`, 0.3 % for the evaluations of a run (`validation`),
the rest to train on. Vocabulary and data are made once for each setting. A run is `bert-pretrain train` in a process of
its own. Runs that are in `results.jsonl` are not repeated.

    python scripts/bench_learning.py CORPUS --language en --work OUT --variants base mask-30 --seeds 1 2 3 --steps 1200

`a+b` takes both changes; `KEY=VALUE` is a variant too. The score compares across vocabularies: nats per byte of masked
words. The words are chosen from plain text before it is tokenized, all pieces of a word are masked, and `transformers`
opens the folder. A word that becomes [UNK] costs the entropy of uniform bytes.

`--usual MINUTES` compares `run auto` with the usual way instead: `BertForPreTraining` of `transformers` from scratch,
padded batches of 64 examples of 128 tokens, 30,522 tokens, AdamW 5e-4, weight decay 0.01, warm-up 6 %, linear decay,
dropout 0.1, L4-H256. Its vocabulary and data come from this package and do not count in its time. `run auto` gets a
share of the time, for everything.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import lzma
import math
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_pretrain import load_data
from bert_pretrain.rng import stream
from bert_pretrain.train import hardware

SPLITS = {"dev": 0.01, "test": 0.02, "validation": 0.003}
SHARED_SETTINGS = ("data.", "vocab.")
BASE = {
    "data.max_seq_length": "64",
    "data.dupe_factor": "1",
    "data.masking": "dynamic",
    "model.max_position_embeddings": "64",
    "model.hidden_dropout_prob": "0",
    "model.attention_probs_dropout_prob": "0",
    "train.global_batch_size": "32",
    "train.optimizer": "muon",
    "train.peak_lr": "3e-3",
    "train.warmup_ratio": "0.05",
    "train.weight_decay": "0.01",
}
"""What all variants share unless they say otherwise."""
VARIANTS: dict[str, dict[str, str]] = {
    "base": {},
    "auto": {"train.peak_lr": "4e-3", "train.mlm_bias": "unigram", "train.init": "positional_heads"},
    "positional-heads": {"train.init": "positional_heads"},
    "unigram-bias": {"train.mlm_bias": "unigram"},
    "mask-30": {"data.masked_lm_prob": "0.3"},
    "whole-words": {"data.whole_word_mask": "true"},
    "adamw": {"train.optimizer": "adamw", "train.peak_lr": "2e-3"},
    "no-nsp": {"data.next_sentence": "none"},
    "dropout": {"model.hidden_dropout_prob": "0.1", "model.attention_probs_dropout_prob": "0.1"},
    "length-128": {
        "data.max_seq_length": "128",
        "model.max_position_embeddings": "128",
        "train.global_batch_size": "16",
    },
}
"""Changes to it; `base` is without any. Sizes, vocabularies and batches are flags."""
USUAL_BATCH, USUAL_LENGTH, USUAL_VOCAB_SIZE = 64, 128, 30522
USUAL_LR, USUAL_WEIGHT_DECAY, USUAL_WARMUP_SHARE = 5e-4, 0.01, 0.06
USUAL_LAYERS, USUAL_HIDDEN = 4, 256
MASKED_SHARE = 0.15
MAX_CHARACTERS = {"latin": 130, "cjk": 44}
"""Characters of a context."""
MAX_TOKENS = 60
"""A context that could have more pieces, were every third character a piece of its own, is left out."""
SCORED_AT_ONCE = 32
CJK = "\u3400-\u4dbf\u4e00-\u9fff"
TOKENS = re.compile(rf"[{CJK}]|[^\W{CJK}]+|[^\w\s]")
NATS_OF_A_BYTE = math.log(256)


@dataclass(frozen=True)
class Run:
    """One training: a variant at a size, for a number of steps, from a seed."""

    corpus: str
    variant: str
    size: str
    vocab_size: int
    batch: int
    steps: int
    seed: int

    @property
    def settings(self) -> dict[str, str]:
        layers, hidden = map(int, self.size.split("x"))
        settings = {**BASE, "train.global_batch_size": str(self.batch)}
        for part in self.variant.split("+"):
            key, is_setting, value = part.partition("=")
            settings |= {key: value} if is_setting else VARIANTS[part]
        return settings | {
            "vocab.size": str(self.vocab_size),
            "model.num_hidden_layers": str(layers),
            "model.hidden_size": str(hidden),
            "model.num_attention_heads": str(max(1, hidden // 64)),
            "model.intermediate_size": str(4 * hidden),
            "train.max_steps": str(self.steps),
            "train.seed": str(self.seed),
        }


def main() -> None:
    options = parse_arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    name = options.corpus.name.split(".")[0]
    texts = split_corpus(options.corpus, options.work / name)
    if options.usual is not None:
        compare_with_usual(texts, options)
        return
    wanted = [
        Run(name, variant, size, vocab_size, batch, steps, seed)
        for size in options.sizes
        for vocab_size in options.vocab_sizes
        for batch in options.batch
        for steps in options.steps
        for variant in options.variants
        for seed in options.seeds
    ]
    results = options.work / "results.jsonl"
    done = read_results(results)
    missing = [run for run in wanted if key_of(run) not in done]
    for run in missing:
        done[key_of(run)] = row = train(run, make_data(run, options, texts), options, texts)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    if options.split == "test":
        score_finally(wanted, options, texts)
    else:
        print("\n".join(table([done[key_of(run)] for run in wanted])))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, help="sentence lines, plain or .xz")
    parser.add_argument("--work", type=Path, required=True, help="where everything is written; the same again goes on")
    parser.add_argument("--language", default="en")
    parser.add_argument(
        "--variants", nargs="+", default=["base"], help=f"of {', '.join(VARIANTS)}, KEY=VALUE, or both as a+b"
    )
    parser.add_argument("--sizes", nargs="+", default=["2x128"], help="layers x hidden size")
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[8192])
    parser.add_argument("--batch", nargs="+", type=int, default=[32], help="examples a step")
    parser.add_argument("--steps", nargs="+", type=int, default=[1200])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each")
    parser.add_argument("--contexts", type=int, default=1500, help="contexts that are scored")
    parser.add_argument("--split", choices=["dev", "test"], default="dev", help="which held-out documents score")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--usual", type=float, metavar="MINUTES", help="compare run auto with so long a usual training")
    parser.add_argument("--share", type=float, default=0.1, help="of that time, for run auto, all stages included")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time for the usual way")
    return parser.parse_args()


def split_corpus(corpus: Path, folder: Path) -> dict[str, Path]:
    """Write the documents of each split to a file of its own, and return the files."""
    paths = {name: folder / f"{name}.txt" for name in ("train", *SPLITS)}
    if all(path.exists() for path in paths.values()):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        files = {
            name: held.enter_context(path.with_suffix(".part").open("w", encoding="utf-8"))
            for name, path in paths.items()
        }
        for document in read_documents(corpus):
            files[split_of(document)].write(document + "\n\n")
    for path in paths.values():
        path.with_suffix(".part").rename(path)
    return paths


def read_documents(corpus: Path) -> Iterator[str]:
    opened = lzma.open if corpus.suffix == ".xz" else open
    with opened(corpus, "rt", encoding="utf-8") as file:
        lines: list[str] = []
        for line in file:
            if line.strip():
                lines.append(line.rstrip("\n"))
            elif lines:
                yield "\n".join(lines)
                lines = []
        if lines:
            yield "\n".join(lines)


def split_of(document: str) -> str:
    """Return the split of a document, a function of its text."""
    drawn = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") / 2**64
    for name, share in SPLITS.items():
        if drawn < share:
            return name
        drawn -= share
    return "train"


def make_data(run: Run, options: argparse.Namespace, texts: Mapping[str, Path]) -> Path:
    """Make vocabulary and data of a run, unless another run with the same settings had them made."""
    shared = {key: value for key, value in run.settings.items() if key.startswith(SHARED_SETTINGS)}
    shared["data.language"] = options.language
    name = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:10]
    folder = texts["train"].parent
    vocab, data = folder / f"vocab-{run.vocab_size}", folder / f"data-{name}"
    vocab_settings = {key: value for key, value in shared.items() if key != "data.max_seq_length"}
    log = folder / f"data-{name}.log"
    if not (vocab / "manifest.json").exists():
        call(["vocab", str(texts["train"]), "--output", str(vocab)], vocab_settings, log)
    if not (data / "manifest.json").exists():
        held_out = ["--validation", str(texts["validation"])]
        call(["make-data", str(texts["train"]), "--vocab", str(vocab), "--output", str(data), *held_out], shared, log)
    return data


def train(run: Run, data: Path, options: argparse.Namespace, texts: Mapping[str, Path]) -> dict[str, Any]:
    """Train and score; returns the row of the results."""
    folder = options.work / "runs" / key_of(run)
    settings = {key: value for key, value in run.settings.items() if not key.startswith(SHARED_SETTINGS)}
    settings |= {"train.eval_every": str(run.steps), "train.save_every": str(run.steps)}
    settings["train.log_every"] = "50"
    settings["train.device"] = options.device
    begin = time.perf_counter()
    command = ["train", "--data", str(data), "--output", str(folder)]
    call(command, settings, folder.with_suffix(".log"), threads=options.threads)
    seconds = time.perf_counter() - begin
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "validation_mlm_loss" not in line][-1]
    validation = [line for line in lines if "validation_mlm_loss" in line][-1]
    score = score_of(folder / "model", texts["dev"], options)
    return {
        **asdict(run),
        "language": options.language,
        "nats_per_byte": score,
        "mlm_loss": validation["validation_mlm_loss"],
        "mlm_accuracy": validation["validation_mlm_accuracy"],
        "nsp_accuracy": validation["validation_nsp_accuracy"],
        "train_mlm_loss": trained["mlm_loss"],
        "tokens": trained["tokens"],
        "epochs": trained["epoch"],
        "seconds": trained["elapsed_seconds"],
        "wall_seconds": seconds,
    }


def score_finally(wanted: list[Run], options: argparse.Namespace, texts: Mapping[str, Path]) -> None:
    """Print the score of models on the test split."""
    for run in wanted:
        score = score_of(options.work / "runs" / key_of(run) / "model", texts["test"], options)
        print(f"{key_of(run)}: {score:.4f} nats per byte of masked words (test)")


def score_of(model: Path, text: Path, options: argparse.Namespace) -> float:
    """Return what a byte of a masked word of a text costs a model folder, in nats."""
    return nats_per_byte(model, contexts(text, options.contexts))


def call(arguments: list[str], settings: Mapping[str, str], log: Path, *, threads: int | None = None) -> None:
    """Run a command of the package."""
    command = [sys.executable, "-m", "bert_pretrain", *arguments]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    environment = os.environ if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        if subprocess.run(command, env=environment, stdout=file, stderr=file).returncode:
            raise SystemExit(f"failed: {' '.join(command)}\nsee {log}")


def key_of(run: Run) -> str:
    return f"{run.corpus}_{run.variant}_{run.size}_v{run.vocab_size}_b{run.batch}_n{run.steps}_s{run.seed}"


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {key_of(Run(**{name: row[name] for name in Run.__dataclass_fields__})): row for row in rows}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table of means, with least and most, over seeds."""
    lines = [
        "| run | seeds | nats per byte | held-out MLM, nats | NSP | tokens | seconds |",
        "|---|---:|---|---|---|---:|---:|",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = f"{row['corpus']} {row['variant']}, L{row['size'].replace('x', '-H')}, {row['vocab_size']:,} tokens"
        groups.setdefault(f"{name}, batch {row['batch']}, {row['steps']:,} steps", []).append(row)
    for name, group in groups.items():
        cells = [f"{name} | {len(group)}"]
        for figure, form in (("nats_per_byte", ".4f"), ("mlm_loss", ".3f"), ("nsp_accuracy", ".1%")):
            values = [row[figure] for row in group if row[figure] is not None]
            if not values:
                cells.append("–")
                continue
            spread = f"{min(values):{form}}–{max(values):{form}}"
            cells.append(f"{statistics.mean(values):{form}} ({spread})")
        means = (statistics.mean(row[figure] for row in group) for figure in ("tokens", "seconds"))
        cells += [f"{value:,.0f}" for value in means]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# ── run auto against the usual way ──


def compare_with_usual(texts: Mapping[str, Path], options: argparse.Namespace) -> None:
    """Train both ways from each seed, and print their scores on the test split."""
    data = usual_data(texts["train"], options)
    scores: dict[str, list[float]] = {"usual": [], "auto": []}
    for seed, way in itertools.product(options.seeds, scores):
        model = texts["train"].parent / f"{way}-{options.usual:g}m-s{seed}"
        begin = time.perf_counter()
        if way == "usual" and not model.exists():
            # A process of its own, which leaves nothing to the next one.
            process = multiprocessing.get_context("spawn").Process(
                target=train_usual, args=(data, model, seed, options)
            )
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit("the usual training failed")
        elif way == "auto":
            seconds = 60 * options.usual * options.share
            arguments = ["run", "auto", str(texts["train"]), "--time", f"{seconds:g}s", "--output", str(model)]
            settings = {"train.seed": str(seed), "train.device": options.device}
            call(arguments, settings, model.with_name(f"{model.name}.log"))
        seconds = time.perf_counter() - begin
        scores[way].append(score_of(model / "train" / "model" if way == "auto" else model, texts["test"], options))
        print(f"{way}, seed {seed}: {seconds:.0f} s, {scores[way][-1]:.4f} nats per byte", flush=True)
    for way, values in scores.items():
        print(f"{way}: {np.mean(values):.4f} ({min(values):.4f}–{max(values):.4f}) nats per byte of masked words")


def usual_data(text: Path, options: argparse.Namespace) -> Path:
    """Make vocabulary and data of the usual way; what is there stays."""
    vocab, data = text.with_name(f"vocab-{USUAL_VOCAB_SIZE}"), text.with_name(f"usual-{USUAL_LENGTH}")
    shared, log = {"data.language": options.language}, text.with_name("usual.log")
    call(["vocab", str(text), "--output", str(vocab)], {**shared, "vocab.size": str(USUAL_VOCAB_SIZE)}, log)
    settings = {**shared, "data.max_seq_length": str(USUAL_LENGTH), "data.dupe_factor": "1"}
    call(["make-data", str(text), "--vocab", str(vocab), "--output", str(data)], settings, log)
    return data


def train_usual(data: Path, output: Path, seed: int, options: argparse.Namespace) -> None:
    """Train `BertForPreTraining` for `minutes`, and save it."""
    from transformers import AutoTokenizer, BertConfig, BertForPreTraining

    torch.manual_seed(seed)
    torch.set_num_threads(options.threads)
    total, clock = 60 * options.usual, time.perf_counter
    if options.cpu_time:
        total, clock = total * options.threads, time.process_time
    device = hardware.choose_device(options.device)
    dtype = hardware.choose_precision("auto", device).dtype
    config = BertConfig(
        vocab_size=USUAL_VOCAB_SIZE,
        hidden_size=USUAL_HIDDEN,
        num_hidden_layers=USUAL_LAYERS,
        num_attention_heads=USUAL_HIDDEN // 64,
        intermediate_size=4 * USUAL_HIDDEN,
        max_position_embeddings=USUAL_LENGTH,
    )
    model: Any = BertForPreTraining(config).train()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=USUAL_LR, weight_decay=USUAL_WEIGHT_DECAY)
    begin, folder = clock(), load_data(data)
    epochs = (
        folder.loader("train", batch_size=USUAL_BATCH, epoch=epoch, seed=seed, padding="max_length")
        for epoch in itertools.count()
    )
    for step, batch in enumerate(itertools.chain.from_iterable(epochs), 1):
        passed = (clock() - begin) / total
        if passed >= 1.0:
            break
        rate = USUAL_LR * min((passed + 1e-3) / USUAL_WARMUP_SHARE, (1.0 - passed) / (1.0 - USUAL_WARMUP_SHARE))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(**{name: values.to(device) for name, values in batch.items()}).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"usual way: step {step}, loss {loss.item():.3f}, {passed:.0%} of the time", flush=True)
    print(f"usual way: {step:,} steps of {USUAL_BATCH} examples", flush=True)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(output)


# ── the score ──


@dataclass(frozen=True)
class Context:
    """Consecutive words of one document, and which of them are masked."""

    words: tuple[str, ...]
    masked: tuple[int, ...]


def contexts(text: Path, number: int, seed: int = 0) -> list[Context]:
    """Return `number` contexts from documents (sentence lines, blank lines between), spread over all of them."""
    rng = stream(seed, "masked words")
    found: list[Context] = []
    documents = list(_documents(text))
    share = max(1, math.ceil(1.2 * number / len(documents)))
    for words in documents:
        starts = rng.permutation(max(1, len(words) - 20))[:share]
        found += [context for start in starts if (context := _context(words, int(start), rng)) is not None]
    order = rng.permutation(len(found))[:number]
    return [found[place] for place in sorted(order)]


def _documents(text: Path) -> Iterator[list[str]]:
    for document in text.read_text(encoding="utf-8").split("\n\n"):
        words = TOKENS.findall(document)
        if len(words) > 20:
            yield words


def _context(words: Sequence[str], start: int, rng: np.random.Generator) -> Context | None:
    kind = "cjk" if re.search(f"[{CJK}]", "".join(words[start : start + 10])) else "latin"
    end, size = start, 0
    while end < len(words) and size + len(words[end]) + 1 <= MAX_CHARACTERS[kind]:
        size += len(words[end]) + (kind == "latin")
        end += 1
    chosen = [place for place, word in enumerate(words[start:end]) if word[0].isalnum()]
    count = round(MASKED_SHARE * len(chosen))
    if not count or sum(-(-len(word) // 3) for word in words[start:end]) > MAX_TOKENS:
        return None
    return Context(tuple(words[start:end]), tuple(sorted(rng.choice(chosen, count, replace=False).tolist())))


@torch.no_grad()
def nats_per_byte(folder: Path, asked: Sequence[Context]) -> float:
    """Return what a byte of a masked word costs a model, in nats."""
    from transformers import AutoModelForPreTraining, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForPreTraining.from_pretrained(folder).eval()
    total, size = 0.0, 0
    for first in range(0, len(asked), SCORED_AT_ONCE):
        batch = asked[first : first + SCORED_AT_ONCE]
        encoded = [_encode(context, tokenizer) for context in batch]
        longest = max(len(ids) for ids, _, _ in encoded)
        if longest > model.config.max_position_embeddings:
            raise ValueError(f"{folder}: a context has {longest} tokens, more than the model has positions")
        ids = torch.full((len(encoded), longest), tokenizer.pad_token_id)
        for row, (own, _, _) in enumerate(encoded):
            ids[row, : len(own)] = torch.tensor(own)
        logits = model(input_ids=ids, attention_mask=ids != tokenizer.pad_token_id).prediction_logits
        for row, (_, places, labels) in enumerate(encoded):
            shares = logits[row, places].double().log_softmax(dim=1)
            costs = -shares[torch.arange(len(places)), labels]
            total += float(costs[torch.tensor(labels) != tokenizer.unk_token_id].sum())
        for context in batch:
            for place in context.masked:
                word = context.words[place]
                size += len(word.encode())
                if tokenizer.unk_token_id in tokenizer.encode(word, add_special_tokens=False):
                    total += NATS_OF_A_BYTE * len(word.encode())
    return total / size


def _encode(context: Context, tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the ids with masks, the positions that are predicted, and the ids that were there."""
    ids: list[int] = [tokenizer.cls_token_id]
    places: list[int] = []
    labels: list[int] = []
    for number, word in enumerate(context.words):
        pieces = tokenizer.encode(word, add_special_tokens=False)
        if number in context.masked:
            places += range(len(ids), len(ids) + len(pieces))
            labels += pieces
            pieces = [tokenizer.mask_token_id] * len(pieces)
        ids += pieces
    return [*ids, tokenizer.sep_token_id], places, labels


if __name__ == "__main__":
    main()

"""Compare training recipes: train variants with several seeds, and score the models on held-out text.

The corpus has one sentence per line and blank lines between documents. It is split by document: 1 % to compare variants
(`dev`), 2 % for the final scores (`--split test`), 0.3 % for the evaluations of a run (`validation`), the rest for
training. Each run is a new process of `bert-pretrain train`. Runs in `results.jsonl` are not repeated.

    python scripts/bench_learning.py CORPUS --language en --work OUT --variants base data.masked_lm_prob=0.3 --seeds 1 2

A variant is `base`, `auto` or `KEY=VALUE`, and `a+b` combines two. The score, nats per byte of masked words, is
comparable between vocabularies: words are masked in the plain text, with all their tokens, and models are loaded by
`transformers`. A word that becomes [UNK] costs the entropy of uniform bytes.

`--usual MINUTES` compares `run auto` with a baseline: `BertForPreTraining` of `transformers`, L4-H256, dropout 0.1,
padded batches of 64 examples of 128 tokens, 30,522 tokens, AdamW, peak learning rate 5e-4, weight decay 0.01, warm-up
6 %, linear decay. The vocabulary and data of the baseline come from this package, and their time is not counted.
`run auto` gets a share of the time for all its stages.
"""

import argparse
import hashlib
import itertools
import json
import lzma
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Row, append_rows, parser_of, read_rows, run_package, spread, table

from bert_pretrain import load_data
from bert_pretrain.model import devices
from bert_pretrain.rng import stream

SPLITS = {"dev": 0.01, "test": 0.02, "validation": 0.003}
DATA_SECTIONS = ("data.", "vocab.")  # settings of the data stages
BASE = {
    "data.max_seq_length": "64", "data.dupe_factor": "1", "data.masking": "dynamic",
    "model.max_position_embeddings": "64", "model.hidden_dropout_prob": "0", "model.attention_probs_dropout_prob": "0",
    "train.global_batch_size": "32", "train.optimizer": "muon", "train.peak_lr": "3e-3", "train.warmup_ratio": "0.05",
    "train.weight_decay": "0.01",
}  # fmt: skip
# Changes to `BASE`. Model size, vocabulary size and batch size are flags.
VARIANTS: dict[str, dict[str, str]] = {
    "base": {},
    "auto": {"train.peak_lr": "4e-3", "train.mlm_bias": "unigram", "train.init": "cooccurrences"},
}
METRICS = {"nats_per_byte": ".4f", "mlm_loss": ".3f", "nsp_accuracy": ".1%", "tokens": ",.0f", "seconds": ",.0f"}
BASELINE_BATCH = 64
BASELINE_LENGTH = 128
BASELINE_VOCAB_SIZE = 30522
BASELINE_LR = 5e-4
BASELINE_WARMUP_SHARE = 0.06
BASELINE_DATA = {"vocab.size": BASELINE_VOCAB_SIZE, "data.max_seq_length": BASELINE_LENGTH, "data.dupe_factor": 1}
BASELINE_CONFIG = {
    "vocab_size": BASELINE_VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": BASELINE_LENGTH,
}
MASKED_SHARE = 0.15
MAX_CHARACTERS = {"latin": 130, "cjk": 44}  # per context
MAX_TOKENS = 60  # per context, at three characters per token
SCORING_BATCH = 32
CJK = "\u3400-\u4dbf\u4e00-\u9fff"
WORDS = re.compile(rf"[{CJK}]|[^\W{CJK}]+|[^\w\s]")
NATS_PER_BYTE = math.log(256)  # of uniform bytes


@dataclass(frozen=True)
class Run:
    """A training run: a variant, its sizes and a seed."""

    corpus: str
    variant: str
    size: str
    vocab_size: int
    batch: int
    steps: int
    seed: int

    @property
    def settings(self) -> dict[str, object]:
        layers, hidden = map(int, self.size.split("x"))
        settings: dict[str, object] = {**BASE, "train.global_batch_size": self.batch}
        for part in self.variant.split("+"):
            key, is_setting, value = part.partition("=")
            settings |= {key: value} if is_setting else VARIANTS[part]
        return settings | {
            "vocab.size": self.vocab_size,
            "train.max_steps": self.steps,
            "train.seed": self.seed,
            "model.num_hidden_layers": layers,
            "model.hidden_size": hidden,
            "model.num_attention_heads": max(1, hidden // 64),
            "model.intermediate_size": 4 * hidden,
        }

    @property
    def key(self) -> str:
        name = f"{self.corpus}_{self.variant}_{self.size}"
        return f"{name}_v{self.vocab_size}_b{self.batch}_n{self.steps}_s{self.seed}"


def main() -> None:
    options = parse_arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    name = options.corpus.name.split(".")[0]
    texts = split_corpus(options.corpus, options.work / name)
    if options.usual is not None:
        compare_with_baseline(texts, options)
        return
    corpora = [name]
    axes = (corpora, options.variants, options.sizes, options.vocab_sizes, options.batch, options.steps, options.seeds)
    runs = [Run(*values) for values in itertools.product(*axes)]
    results = options.work / "results.jsonl"
    results.touch()
    done = {Run(**{field.name: row[field.name] for field in fields(Run)}): row for row in read_rows(results)}
    for run in runs:
        if run not in done:
            done[run] = train(run, make_data(run, options, texts), options, texts)
            append_rows(results, [done[run]])
    rows = [done[run] for run in runs]
    if options.split == "test":
        models = [options.work / "runs" / run.key / "model" for run in runs]
        rows = [
            {**row, "nats_per_byte": score_of(model, texts["test"], options)}
            for row, model in zip(rows, models, strict=True)
        ]
    print(f"\n{results_table(rows)}")


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("corpus", type=Path, help="one sentence per line, plain text or .xz")
    parser.add_argument("--work", type=Path, required=True, help="output folder; finished runs in it are reused")
    parser.add_argument("--language", default="en")
    parser.add_argument("--variants", nargs="+", default=["base"], help=f"{', '.join(VARIANTS)}, KEY=VALUE, or a+b")
    parser.add_argument("--sizes", nargs="+", default=["2x128"], help="layers x hidden size")
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[8192])
    parser.add_argument(
        "--batch",
        nargs="+",
        type=int,
        default=[32],
        help="examples per step",
    )
    parser.add_argument("--steps", nargs="+", type=int, default=[1200])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per run")
    parser.add_argument("--contexts", type=int, default=1500, help="number of contexts to score")
    parser.add_argument("--split", choices=["dev", "test"], default="dev", help="documents to score")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--usual", type=float, metavar="MINUTES", help="compare run auto with a baseline of this time")
    parser.add_argument("--share", type=float, default=0.1, help="time of run auto, as a fraction of --usual")
    return parser.parse_args()


def split_corpus(corpus: Path, folder: Path) -> dict[str, Path]:
    """Write the documents of each split to one file, and return the paths."""
    paths = {name: folder / f"{name}.txt" for name in (*SPLITS, "train")}
    if paths["train"].exists():  # written last
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    open_text = lzma.open if corpus.suffix == ".xz" else open
    with open_text(corpus, "rt", encoding="utf-8") as file:
        documents = re.split(r"\n\s*\n", file.read().strip("\n"))
    splits: dict[str, list[str]] = {name: [] for name in paths}
    for document in documents:
        splits[split_of(document)].append(document)
    for name, path in paths.items():
        part = path.with_suffix(".part")
        part.write_text("".join(f"{document}\n\n" for document in splits[name]), encoding="utf-8")
        part.rename(path)
    return paths


def split_of(document: str) -> str:
    """Return the split of a document, chosen by a hash of its text."""
    position = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") / 2**64
    for name, share in SPLITS.items():
        if position < share:
            return name
        position -= share
    return "train"


def make_data(run: Run, options: argparse.Namespace, texts: Mapping[str, Path]) -> Path:
    """Make the vocabulary and the data of a run, unless a run with the same settings has made them."""
    settings = {key: value for key, value in run.settings.items() if key.startswith(DATA_SECTIONS)}
    settings["data.language"] = options.language
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
    folder = texts["train"].with_name(f"data-{digest}")
    return make_folders(
        texts["train"],
        folder,
        settings,
        "--validation",
        texts["validation"],
    )


def make_folders(text: Path, folder: Path, settings: Mapping[str, object], *flags: object) -> Path:
    """Make a vocabulary and data, and return the data folder; both commands skip finished outputs."""
    vocab, data = folder / "vocab", folder / "data"
    run_package(
        "vocab",
        text,
        "--output",
        vocab,
        settings=settings,
    )
    run_package(
        "make-data",
        text,
        "--vocab",
        vocab,
        "--output",
        data,
        *flags,
        settings=settings,
    )
    return data


def train(run: Run, data: Path, options: argparse.Namespace, texts: Mapping[str, Path]) -> Row:
    """Train and score a run, and return its row of the results."""
    folder = options.work / "runs" / run.key
    settings = {key: value for key, value in run.settings.items() if not key.startswith(DATA_SECTIONS)}
    settings |= {"train.eval_every": run.steps, "train.save_every": run.steps, "train.log_every": 50}
    settings["train.device"] = options.device
    usage = run_package(
        "train",
        "--data",
        data,
        "--output",
        folder,
        settings=settings,
        threads=options.threads,
    )
    last: Row = {}
    for line in read_rows(folder / "metrics.jsonl"):
        last |= line
    return {
        **asdict(run),
        "language": options.language,
        "init": run.settings.get("train.init", "normal"),
        "nats_per_byte": score_of(folder / "model", texts["dev"], options),
        **{key: last[f"validation_{key}"] for key in ("mlm_loss", "mlm_accuracy", "nsp_accuracy")},
        "train_mlm_loss": last["mlm_loss"],
        "tokens": last["tokens"],
        "epochs": last["epoch"],
        "seconds": last["elapsed_seconds"],
        "wall_seconds": usage.seconds,
    }


def score_of(model: Path, text: Path, options: argparse.Namespace) -> float:
    return nats_per_byte(model, contexts(text, options.contexts))


def results_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with the mean, minimum and maximum over seeds."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = f"{row['corpus']} {row['variant']}, L{row['size'].replace('x', '-H')}, {row['vocab_size']:,} tokens"
        groups.setdefault(f"{name}, batch {row['batch']}, {row['steps']:,} steps", []).append(row)
    lines = []
    for name, group in groups.items():
        cells = [name, len(group)]
        for metric, form in METRICS.items():
            values = [row[metric] for row in group if row[metric] is not None]
            cells.append(mean_and_range(values, form) if values else "–")
        lines.append(cells)
    return table(["run", "seeds", "nats per byte", "held-out MLM, nats", "NSP", "tokens", "seconds"], lines)


mean_and_range = partial(spread, middle=statistics.mean)


# ── run auto and the baseline ──


def compare_with_baseline(texts: Mapping[str, Path], options: argparse.Namespace) -> None:
    """Train with both methods and all seeds, and print the scores on the test split."""
    settings = {**BASELINE_DATA, "data.language": options.language}
    data = make_folders(texts["train"], texts["train"].with_name("usual-data"), settings)
    scores: dict[str, list[float]] = {"usual": [], "auto": []}
    for seed, method in itertools.product(options.seeds, scores):
        model = texts["train"].parent / f"{method}-{options.usual:g}m-s{seed}"
        if method == "usual" and not model.exists():
            arguments = [data, model, seed, options.threads, options.device, 60 * options.usual]
            # A new process, so that the runs do not share state.
            subprocess.run([sys.executable, __file__, "--baseline", *map(str, arguments)], check=True)
        elif method == "auto":
            seconds = 60 * options.usual * options.share
            settings = {"train.seed": seed, "train.device": options.device}
            words = ("run", "auto", texts["train"], "--time", f"{seconds:g}s", "--output", model)
            run_package(*words, settings=settings)
            model = model / "train" / "model"
        scores[method].append(score_of(model, texts["test"], options))
        print(f"{method}, seed {seed}: {scores[method][-1]:.4f} nats per byte", flush=True)
    for method, values in scores.items():
        print(f"{method}: {mean_and_range(values, '.4f')} nats per byte of masked words")


def train_baseline(
    data: str,
    output: str,
    seed: str,
    threads: str,
    device_name: str,
    seconds: str,
) -> None:
    """Train `BertForPreTraining` of `transformers` for a number of seconds, and save it."""
    from bench_train import Peer
    from transformers import AutoTokenizer

    torch.manual_seed(int(seed))
    torch.set_num_threads(int(threads))
    device = devices.choose_device(device_name)
    peer = Peer(BASELINE_CONFIG, device, devices.choose_precision("auto", device).dtype)
    begin = time.perf_counter()
    loader = partial(load_data(data).loader, batch_size=BASELINE_BATCH, seed=int(seed), padding="max_length")
    epochs = (loader("train", epoch=epoch) for epoch in itertools.count())
    for step, batch in enumerate(itertools.chain.from_iterable(epochs), 1):
        progress = (time.perf_counter() - begin) / float(seconds)
        if progress >= 1.0:
            break
        warmup = (progress + 1e-3) / BASELINE_WARMUP_SHARE
        decay = (1.0 - progress) / (1.0 - BASELINE_WARMUP_SHARE)
        for group in peer.optimizer.param_groups:
            group["lr"] = BASELINE_LR * min(warmup, decay)
        loss = peer.take({name: values.to(device) for name, values in batch.items()})
        if step % 20 == 0:
            print(f"baseline: step {step}, loss {loss.item():.3f}, {progress:.0%} of the time", flush=True)
    print(f"baseline: {step:,} steps of {BASELINE_BATCH} examples", flush=True)
    peer.model.save_pretrained(output)
    AutoTokenizer.from_pretrained(Path(data) / "tokenizer").save_pretrained(output)


# ── the score ──


@dataclass(frozen=True)
class Context:
    """Consecutive words of a document, some of them masked."""

    words: tuple[str, ...]
    masked: tuple[int, ...]  # indices into `words`


def contexts(text: Path, number: int, seed: int = 0) -> list[Context]:
    rng = stream(seed, "masked words")
    candidates: list[Context] = []
    documents = [WORDS.findall(document) for document in text.read_text(encoding="utf-8").split("\n\n")]
    documents = [words for words in documents if len(words) > 20]
    per_document = max(1, math.ceil(1.2 * number / len(documents)))
    for words in documents:
        starts = rng.permutation(max(1, len(words) - 20))[:per_document]
        candidates += [context for start in starts if (context := _context(words, int(start), rng)) is not None]
    order = rng.permutation(len(candidates))[:number]
    return [candidates[index] for index in sorted(order)]


def _context(words: Sequence[str], start: int, rng: np.random.Generator) -> Context | None:
    kind = "cjk" if re.search(f"[{CJK}]", "".join(words[start : start + 10])) else "latin"
    end, size = start, 0
    while end < len(words) and size + len(words[end]) + 1 <= MAX_CHARACTERS[kind]:
        size += len(words[end]) + (kind == "latin")
        end += 1
    maskable = [index for index, word in enumerate(words[start:end]) if word[0].isalnum()]
    num_masked = round(MASKED_SHARE * len(maskable))
    if not num_masked or sum(-(-len(word) // 3) for word in words[start:end]) > MAX_TOKENS:
        return None
    return Context(tuple(words[start:end]), tuple(sorted(rng.choice(maskable, num_masked, replace=False).tolist())))


@torch.no_grad()
def nats_per_byte(folder: Path, contexts: Sequence[Context]) -> float:
    """Return the loss of a model folder on masked words, in nats per byte."""
    from transformers import AutoModelForPreTraining, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForPreTraining.from_pretrained(folder).eval()
    total, num_bytes = 0.0, 0
    for first in range(0, len(contexts), SCORING_BATCH):
        batch = contexts[first : first + SCORING_BATCH]
        encoded = [_encode(context, tokenizer) for context in batch]
        inputs = tokenizer.pad({"input_ids": [ids for ids, _ in encoded]}, return_tensors="pt")
        if inputs["input_ids"].shape[1] > model.config.max_position_embeddings:
            raise ValueError(f"{folder}: a context has more tokens than the model has positions")
        logits = model(**inputs).prediction_logits
        for row, (_, labels) in enumerate(encoded):
            log_probs = logits[row, list(labels)].double().log_softmax(dim=1)
            targets = torch.tensor(list(labels.values()))
            losses = torch.nn.functional.nll_loss(log_probs, targets, reduction="none")
            total += float(losses[targets != tokenizer.unk_token_id].sum())
        for word in (context.words[index] for context in batch for index in context.masked):
            num_bytes += len(word.encode())
            if tokenizer.unk_token_id in tokenizer.encode(word, add_special_tokens=False):
                total += NATS_PER_BYTE * len(word.encode())
    return total / num_bytes


def _encode(context: Context, tokenizer: Any) -> tuple[list[int], dict[int, int]]:
    """Return the masked ids, and the original ids by their masked positions."""
    ids: list[int] = [tokenizer.cls_token_id]
    labels: dict[int, int] = {}
    for index, word in enumerate(context.words):
        tokens = tokenizer.encode(word, add_special_tokens=False)
        if index in context.masked:
            labels |= enumerate(tokens, len(ids))
            tokens = [tokenizer.mask_token_id] * len(tokens)
        ids += tokens
    return [*ids, tokenizer.sep_token_id], labels


if __name__ == "__main__":
    if sys.argv[1:2] == ["--baseline"]:
        train_baseline(*sys.argv[2:])
    else:
        main()

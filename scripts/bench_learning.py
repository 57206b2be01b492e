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
BASELINE_BATCH = 64
BASELINE_LENGTH = 128
BASELINE_VOCAB_SIZE = 30522
BASELINE_LR = 5e-4
BASELINE_WARMUP_SHARE = 0.06
BASELINE_LAYERS = 4
BASELINE_HIDDEN = 256
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
    def settings(self) -> dict[str, str]:
        layers, hidden = map(int, self.size.split("x"))
        settings = {**BASE, "train.global_batch_size": str(self.batch)}
        for part in self.variant.split("+"):
            key, is_setting, value = part.partition("=")
            settings |= {key: value} if is_setting else VARIANTS[part]
        return settings | {
            "vocab.size": str(self.vocab_size), "train.max_steps": str(self.steps), "train.seed": str(self.seed),
            "model.num_hidden_layers": str(layers), "model.hidden_size": str(hidden),
            "model.num_attention_heads": str(max(1, hidden // 64)), "model.intermediate_size": str(4 * hidden),
        }  # fmt: skip


def main() -> None:
    options = parse_arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    name = options.corpus.name.split(".")[0]
    texts = split_corpus(options.corpus, options.work / name)
    if options.usual is not None:
        compare_with_baseline(texts, options)
        return
    axes = (options.sizes, options.vocab_sizes, options.batch, options.steps, options.variants, options.seeds)
    runs = [
        Run(name, variant, size, vocab_size, batch, steps, seed)
        for size, vocab_size, batch, steps, variant, seed in itertools.product(*axes)
    ]
    results = options.work / "results.jsonl"
    done = read_results(results)
    for run in runs:
        if key_of(run) not in done:
            done[key_of(run)] = row = train(run, make_data(run, options, texts), options, texts)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    if options.split == "dev":
        print("\n".join(table([done[key_of(run)] for run in runs])))
        return
    for run in runs:
        score = score_of(options.work / "runs" / key_of(run) / "model", texts["test"], options)
        print(f"{key_of(run)}: {score:.4f} nats per byte of masked words (test)")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, help="one sentence per line, plain text or .xz")
    parser.add_argument("--work", type=Path, required=True, help="output folder; finished runs in it are reused")
    parser.add_argument("--language", default="en")
    parser.add_argument("--variants", nargs="+", default=["base"], help=f"{', '.join(VARIANTS)}, KEY=VALUE, or a+b")
    parser.add_argument("--sizes", nargs="+", default=["2x128"], help="layers x hidden size")
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[8192])
    parser.add_argument("--batch", nargs="+", type=int, default=[32], help="examples per step")
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
    paths = {name: folder / f"{name}.txt" for name in ("train", *SPLITS)}
    if all(path.exists() for path in paths.values()):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: path.with_suffix(".part").open("w", encoding="utf-8") for name, path in paths.items()}
    for document in read_documents(corpus):
        files[split_of(document)].write(document + "\n\n")
    for name, path in paths.items():
        files[name].close()
        path.with_suffix(".part").rename(path)
    return paths


def read_documents(corpus: Path) -> Iterator[str]:
    open_text = lzma.open if corpus.suffix == ".xz" else open
    with open_text(corpus, "rt", encoding="utf-8") as file:
        for is_document, lines in itertools.groupby(file, lambda line: bool(line.strip())):
            if is_document:
                yield "\n".join(line.rstrip("\n") for line in lines)


def split_of(document: str) -> str:
    """Return the split of a document, chosen by a hash of its text."""
    position = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") / 2**64
    for name, share in SPLITS.items():
        if position < share:
            return name
        position -= share
    return "train"


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def make_data(run: Run, options: argparse.Namespace, texts: Mapping[str, Path]) -> Path:
    """Make the vocabulary and the data of a run, unless a run with the same settings has made them."""
    settings = {key: value for key, value in run.settings.items() if key.startswith(DATA_SECTIONS)}
    settings["data.language"] = options.language
    vocab_settings = {key: value for key, value in settings.items() if key != "data.max_seq_length"}
    folder, train_text = texts["train"].parent, str(texts["train"])
    vocab, data = folder / f"vocab-{_digest(vocab_settings)}", folder / f"data-{_digest(settings)}"
    log = folder / f"{data.name}.log"
    if not (vocab / "manifest.json").exists():
        call(["vocab", train_text, "--output", str(vocab)], vocab_settings, log)
    if not (data / "manifest.json").exists():
        folders = ["--vocab", str(vocab), "--output", str(data), "--validation", str(texts["validation"])]
        call(["make-data", train_text, *folders], settings, log)
    return data


def train(run: Run, data: Path, options: argparse.Namespace, texts: Mapping[str, Path]) -> dict[str, Any]:
    """Train and score a run, and return its row of the results."""
    folder = options.work / "runs" / key_of(run)
    settings = {key: value for key, value in run.settings.items() if not key.startswith(DATA_SECTIONS)}
    settings |= {"train.eval_every": str(run.steps), "train.save_every": str(run.steps)}
    settings |= {"train.log_every": "50", "train.device": options.device}
    begin = time.perf_counter()
    command = ["train", "--data", str(data), "--output", str(folder)]
    call(command, settings, folder.with_suffix(".log"), threads=options.threads)
    seconds = time.perf_counter() - begin
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "validation_mlm_loss" not in line][-1]
    validation = [line for line in lines if "validation_mlm_loss" in line][-1]
    score = score_of(folder / "model", texts["dev"], options)
    return {
        **asdict(run), "language": options.language, "init": run.settings.get("train.init", "normal"),
        "nats_per_byte": score,
        **{key: validation[f"validation_{key}"] for key in ("mlm_loss", "mlm_accuracy", "nsp_accuracy")},
        "train_mlm_loss": trained["mlm_loss"], "tokens": trained["tokens"], "epochs": trained["epoch"],
        "seconds": trained["elapsed_seconds"], "wall_seconds": seconds,
    }  # fmt: skip


def score_of(model: Path, text: Path, options: argparse.Namespace) -> float:
    return nats_per_byte(model, contexts(text, options.contexts))


def call(arguments: list[str], settings: Mapping[str, str], log: Path, *, threads: int | None = None) -> None:
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
    """Return a Markdown table with the mean, minimum and maximum over seeds."""
    lines = ["| run | seeds | nats per byte | held-out MLM, nats | NSP | tokens | seconds |"]
    lines.append("|---|---:|---|---|---|---:|---:|")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = f"{row['corpus']} {row['variant']}, L{row['size'].replace('x', '-H')}, {row['vocab_size']:,} tokens"
        groups.setdefault(f"{name}, batch {row['batch']}, {row['steps']:,} steps", []).append(row)
    for name, group in groups.items():
        cells = [f"{name} | {len(group)}"]
        for metric, form in (("nats_per_byte", ".4f"), ("mlm_loss", ".3f"), ("nsp_accuracy", ".1%")):
            values = [row[metric] for row in group if row[metric] is not None]
            cells.append(mean_and_range(values, form) if values else "–")
        cells += [f"{statistics.mean(row[metric] for row in group):,.0f}" for metric in ("tokens", "seconds")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def mean_and_range(values: list[float], form: str = ".4f") -> str:
    return f"{statistics.mean(values):{form}} ({min(values):{form}}–{max(values):{form}})"


# ── run auto and the baseline ──


def compare_with_baseline(texts: Mapping[str, Path], options: argparse.Namespace) -> None:
    """Train with both methods and all seeds, and print the scores on the test split."""
    data = baseline_data(texts["train"], options)
    scores: dict[str, list[float]] = {"usual": [], "auto": []}
    for seed, method in itertools.product(options.seeds, scores):
        model = texts["train"].parent / f"{method}-{options.usual:g}m-s{seed}"
        begin = time.perf_counter()
        if method == "usual" and not model.exists():
            # A new process, so that the runs do not share state.
            process = multiprocessing.get_context("spawn").Process(
                target=train_baseline, args=(data, model, seed, options)
            )
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit("the training of the baseline failed")
        elif method == "auto":
            seconds = 60 * options.usual * options.share
            arguments = ["run", "auto", str(texts["train"]), "--time", f"{seconds:g}s", "--output", str(model)]
            settings = {"train.seed": str(seed), "train.device": options.device}
            call(arguments, settings, model.with_name(f"{model.name}.log"))
            model = model / "train" / "model"
        seconds = time.perf_counter() - begin
        scores[method].append(score_of(model, texts["test"], options))
        print(f"{method}, seed {seed}: {seconds:.0f} s, {scores[method][-1]:.4f} nats per byte", flush=True)
    for method, values in scores.items():
        print(f"{method}: {mean_and_range(values)} nats per byte of masked words")


def baseline_data(text: Path, options: argparse.Namespace) -> Path:
    """Make the vocabulary and the data of the baseline; both commands skip finished outputs."""
    vocab, data = text.with_name(f"vocab-{BASELINE_VOCAB_SIZE}"), text.with_name(f"usual-{BASELINE_LENGTH}")
    shared, log = {"data.language": options.language}, text.with_name("usual.log")
    call(["vocab", str(text), "--output", str(vocab)], {**shared, "vocab.size": str(BASELINE_VOCAB_SIZE)}, log)
    settings = {**shared, "data.max_seq_length": str(BASELINE_LENGTH), "data.dupe_factor": "1"}
    call(["make-data", str(text), "--vocab", str(vocab), "--output", str(data)], settings, log)
    return data


def train_baseline(data: Path, output: Path, seed: int, options: argparse.Namespace) -> None:
    """Train `BertForPreTraining` of `transformers` for the time of `--usual`, and save it."""
    from transformers import AutoTokenizer, BertConfig, BertForPreTraining

    torch.manual_seed(seed)
    torch.set_num_threads(options.threads)
    total = 60 * options.usual
    device = devices.choose_device(options.device)
    dtype = devices.choose_precision("auto", device).dtype
    config = BertConfig(
        vocab_size=BASELINE_VOCAB_SIZE, hidden_size=BASELINE_HIDDEN, num_hidden_layers=BASELINE_LAYERS,
        num_attention_heads=BASELINE_HIDDEN // 64, intermediate_size=4 * BASELINE_HIDDEN,
        max_position_embeddings=BASELINE_LENGTH,
    )  # fmt: skip
    model: Any = BertForPreTraining(config).train()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASELINE_LR, weight_decay=0.01)
    begin = time.perf_counter()
    folder = load_data(data)
    epochs = (
        folder.loader("train", batch_size=BASELINE_BATCH, epoch=epoch, seed=seed, padding="max_length")
        for epoch in itertools.count()
    )
    for step, batch in enumerate(itertools.chain.from_iterable(epochs), 1):
        progress = (time.perf_counter() - begin) / total
        if progress >= 1.0:
            break
        warmup, decay = (progress + 1e-3) / BASELINE_WARMUP_SHARE, (1.0 - progress) / (1.0 - BASELINE_WARMUP_SHARE)
        for group in optimizer.param_groups:
            group["lr"] = BASELINE_LR * min(warmup, decay)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(**{name: values.to(device) for name, values in batch.items()}).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"baseline: step {step}, loss {loss.item():.3f}, {progress:.0%} of the time", flush=True)
    print(f"baseline: {step:,} steps of {BASELINE_BATCH} examples", flush=True)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(output)


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

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForPreTraining.from_pretrained(folder).eval()
    total, num_bytes = 0.0, 0
    for first in range(0, len(contexts), SCORING_BATCH):
        batch = contexts[first : first + SCORING_BATCH]
        encoded = [_encode(context, tokenizer) for context in batch]
        longest = max(len(ids) for ids, _, _ in encoded)
        if longest > model.config.max_position_embeddings:
            raise ValueError(f"{folder}: a context has {longest} tokens, more than the model has positions")
        input_ids = torch.full((len(encoded), longest), tokenizer.pad_token_id)
        for row, (ids, _, _) in enumerate(encoded):
            input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask = input_ids != tokenizer.pad_token_id
        logits = model(input_ids=input_ids, attention_mask=attention_mask).prediction_logits
        for row, (_, positions, labels) in enumerate(encoded):
            log_probs = logits[row, positions].double().log_softmax(dim=1)
            losses = -log_probs[torch.arange(len(positions)), labels]
            total += float(losses[torch.tensor(labels) != tokenizer.unk_token_id].sum())
        for word in (context.words[index] for context in batch for index in context.masked):
            num_bytes += len(word.encode())
            if tokenizer.unk_token_id in tokenizer.encode(word, add_special_tokens=False):
                total += NATS_PER_BYTE * len(word.encode())
    return total / num_bytes


def _encode(context: Context, tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the masked ids, the masked positions, and the original ids at these positions."""
    ids: list[int] = [tokenizer.cls_token_id]
    positions: list[int] = []
    labels: list[int] = []
    for index, word in enumerate(context.words):
        tokens = tokenizer.encode(word, add_special_tokens=False)
        if index in context.masked:
            positions += range(len(ids), len(ids) + len(tokens))
            labels += tokens
            tokens = [tokenizer.mask_token_id] * len(tokens)
        ids += tokens
    return [*ids, tokenizer.sep_token_id], positions, labels


if __name__ == "__main__":
    main()

"""A masked language model as ONNX and in 8 bits: size, accuracy on masked tokens, and time of one sentence.

Exports MODEL by `torch.onnx`, quantizes the result by `onnxruntime`, and compares both with `transformers`, in fp32 and
quantized by PyTorch. All predict the same masked tokens of held-out sentences, one sentence at a time. The ways take
turns; times are of the processor, medians over all sentences and rounds. Prints a Markdown table.

    python scripts/bench_export.py MODEL SENTENCES.txt --output OUT [--sentences 300] [--rounds 5]
"""

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from bert_pretrain import rng

MASKED_SHARE = 0.15
MIN_TOKENS = 8
OPSET = 18


class Masked(NamedTuple):
    """A sentence with masked tokens."""

    inputs: dict[str, np.ndarray]  # of (1, tokens)
    positions: np.ndarray
    labels: np.ndarray


Predict = Callable[[dict[str, np.ndarray]], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, help="a sentence per line, which training did not see")
    parser.add_argument("--output", type=Path, required=True, help="the folder for the exported files")
    parser.add_argument("--sentences", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    network = transformers.AutoModelForMaskedLM.from_pretrained(options.model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    sentences = masked_sentences(options.texts, tokenizer, network.config.max_position_embeddings, options.sentences)
    full, small = options.output / "model.onnx", options.output / "model.int8.onnx"
    export(network, tokenizer, full)
    quantize(full, small)
    ways: dict[str, tuple[Predict, float]] = {
        "transformers, fp32": (torch_predict(network), megabytes(options.model / "model.safetensors")),
        "transformers, PyTorch int8": (torch_predict(torch_int8(network)), np.nan),
        "ONNX Runtime, fp32": (onnx_predict(full, options.threads), megabytes(full)),
        "ONNX Runtime, int8": (onnx_predict(small, options.threads), megabytes(small)),
    }
    print("\n".join(table(ways, sentences, options.rounds)))


def export(network: Any, tokenizer: Any, path: Path) -> None:
    """Write a network of `transformers` as ONNX, for any number of texts of any length."""
    example = dict(tokenizer(["one text", "another, longer text"], padding=True, return_tensors="pt"))
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    torch.onnx.export(
        network,
        kwargs=example,
        f=path,
        input_names=list(example),
        output_names=["logits"],
        dynamic_shapes=dict.fromkeys(example, dynamic),
        opset_version=OPSET,
        external_data=False,
        verbose=False,
    )


def quantize(full: Path, small: Path) -> None:
    """Write a copy with weights of 8 bits; activations are quantized while it runs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(full, small, weight_type=QuantType.QInt8)


def torch_int8(network: Any) -> Any:
    """Return a copy whose linear layers have weights of 8 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated in favour of another library
        quantize_network: Any = torch.ao.quantization.quantize_dynamic
        return quantize_network(network, {torch.nn.Linear}, dtype=torch.qint8)


def torch_predict(network: Any) -> Predict:
    def predict(inputs: dict[str, np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            logits = network(**{name: torch.from_numpy(values) for name, values in inputs.items()}).logits
        return np.asarray(logits.numpy())

    return predict


def onnx_predict(path: Path, threads: int) -> Predict:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]


def masked_sentences(path: Path, tokenizer: Any, max_length: int, count: int) -> list[Masked]:
    """Return the first long sentences of a file, with 15 % of their tokens masked."""
    found: list[Masked] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        inputs = dict(tokenizer(line, truncation=True, max_length=max_length, return_tensors="np"))
        length = inputs["input_ids"].shape[1]
        if length < MIN_TOKENS:
            continue
        drawn = rng.stream(0, "masks", sentence=len(found)).permutation(length - 2) + 1  # not [CLS], nor [SEP]
        positions = np.sort(drawn[: max(1, round(MASKED_SHARE * (length - 2)))])
        labels = inputs["input_ids"][0, positions]
        inputs["input_ids"][0, positions] = tokenizer.mask_token_id
        found.append(Masked(inputs, positions, labels))
        if len(found) == count:
            break
    return found


def table(ways: dict[str, tuple[Predict, float]], sentences: list[Masked], rounds: int) -> list[str]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (predict, _) in ways.items():
            times[name] += seconds_each(predict, sentences)
    masked = sum(len(sentence.labels) for sentence in sentences)
    lines = [f"{len(sentences):,} sentences, {masked:,} masked tokens, {rounds} rounds", ""]
    lines.append(
        "| way | MB | accuracy | loss, nats | processor ms per sentence (quartiles) | times as fast as the first |"
    )
    lines += ["|---|---|---|---|---|---|"]
    first = np.nan
    for name, (predict, size) in ways.items():
        accuracy, loss = quality(predict, sentences)
        low, median, high = 1000 * np.quantile(times[name], (0.25, 0.5, 0.75))
        first = median if np.isnan(first) else first
        shown = "" if np.isnan(size) else f"{size:.1f}"
        timing = f"{median:.2f} ({low:.2f}–{high:.2f}) | {first / median:.2f} ×"
        lines.append(f"| {name} | {shown} | {accuracy:.2%} | {loss:.4f} | {timing} |")
    return lines


def seconds_each(predict: Predict, sentences: list[Masked]) -> list[float]:
    times = []
    for sentence in sentences:
        began = time.process_time()  # of all threads; the clock would also count other processes
        predict(sentence.inputs)
        times.append(time.process_time() - began)
    return times


def quality(predict: Predict, sentences: list[Masked]) -> tuple[float, float]:
    """Return the accuracy on masked tokens, and their mean loss in nats."""
    hits, losses = [], []
    for sentence in sentences:
        logits = predict(sentence.inputs)[0, sentence.positions].astype(np.float64)  # (masked, vocabulary)
        hits += list(logits.argmax(axis=1) == sentence.labels)
        shifted = logits - logits.max(axis=1, keepdims=True)
        of_labels = shifted[np.arange(len(sentence.labels)), sentence.labels]
        losses += list(np.log(np.exp(shifted).sum(axis=1)) - of_labels)
    return float(np.mean(hits)), float(np.mean(losses))


def megabytes(path: Path) -> float:
    return path.stat().st_size / 1e6


if __name__ == "__main__":
    main()

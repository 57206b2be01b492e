"""The command-line options that set a key of the configuration: the key, and what `--help` says.

Their type, default, limits and full meaning are those of the key in `config.py`. This module does not import that one,
because importing pydantic takes longer than `--help`.
"""

from typing import NamedTuple


class Flag(NamedTuple):
    """An option, the key that it sets, and the name of its value in the help."""

    key: str
    help: str
    metavar: str | None = None


FLAGS = {
    "--tokens": Flag("vocab.tokens", "WordPiece tokens, or words as tokens.", "wordpiece|words"),
    "--vocab-size": Flag("vocab.size", "Number of tokens, including special tokens.", "N"),
    "--lowercase": Flag(
        "vocab.lowercase",
        "Lowercase the text; default: in English and Chinese. With --extend: casing of its vocabulary, if unknown.",
    ),
    "--add-tokens": Flag("vocab.add_tokens", "With --extend: tokens to add; default: unused slots.", "N"),
    "--encoding": Flag("data.encoding", "Encoding of text files, if not UTF-8; auto detects it per file.", "NAME"),
    "--text-field": Flag("data.text_field", "Name of the text field in records; text by default."),
    "--strict": Flag("data.strict", "Stop at text that cannot be decoded and at records without text."),
    "--validation": Flag("data.validation", "Hold out this input instead of a fraction.", "INPUT"),
    "--weight": Flag("data.input_weights", "Use an input N times as often as others.", "INPUT=N"),
    "--batch-size": Flag("train.global_batch_size", "Examples per step.", "N"),
    "--steps": Flag("train.max_steps", "Length of the run in steps.", "N"),
    "--time": Flag("train.time_budget", "Length of the run, such as 24h or 1h30m.", "TIME"),
    "--learning-rate": Flag("train.peak_lr", "Peak learning rate, after the warm-up.", "RATE"),
    "--teacher": Flag("train.teacher", "Take initial weights from a larger BERT.", "MODEL"),
    "--precision": Flag("train.precision", "Precision of matrix products: fp32, bf16, fp16 or auto."),
    "--device": Flag("train.device", "auto (default), cpu, cuda or cuda:N.", "DEVICE"),
}

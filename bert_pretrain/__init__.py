"""Pretrain BERT from raw text; the result is a Hugging Face model folder."""

TYPE_CHECKING = False  # importing typing would take milliseconds in which Ctrl-C is a traceback
if TYPE_CHECKING:
    from typing import Any

    from bert_pretrain.api import build_data, build_vocab, load_data, load_model, load_tokenizer, pretrain

__version__ = "0.1.0"
__all__ = ["__version__", "build_data", "build_vocab", "load_data", "load_model", "load_tokenizer", "pretrain"]


def __getattr__(name: str) -> "Any":
    """Import the calls of `api.py` when one is first used, so that importing the package costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'bert_pretrain' has no attribute {name!r}")
    from bert_pretrain import api

    return getattr(api, name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)

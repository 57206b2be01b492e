"""Pretrain BERT from raw text. The result is a Hugging Face model folder."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_pretrain.api import build_data, build_vocab, load_data, load_model, load_tokenizer, pretrain

__version__ = "0.1.0"
__all__ = ["__version__", "build_data", "build_vocab", "load_data", "load_model", "load_tokenizer", "pretrain"]


def __getattr__(name: str) -> Any:
    """Import `api.py` on the first use of one of its functions, so that importing the package is fast."""
    if name not in __all__:
        raise AttributeError(f"module 'bert_pretrain' has no attribute {name!r}")
    from bert_pretrain import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)

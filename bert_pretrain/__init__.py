"""Pretrain BERT from raw text to a model that opens in every tool of the Hugging Face ecosystem."""

__version__ = "0.1.0"

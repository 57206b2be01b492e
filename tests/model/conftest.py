"""Random packed batches of mixed lengths, the same padded, and Hugging Face's model with the same weights."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertForPreTraining as Peer

from bert_pretrain.config import ModelConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import save_model
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.batches import Batch
from tests.train.conftest import FIRST_WORD, VOCAB_SIZE, make_tokenizer

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 24, "initializer_range": 0.2,
}  # fmt: skip
"""Initial weights wide enough that the logits differ well and a wrong gradient shows."""


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture
def make_model() -> Callable[..., BertForPreTraining]:
    def make(dropout: float = 0.0, seed: int = 1, **sizes: Any) -> BertForPreTraining:
        config = ModelConfig(**{**SIZES, **sizes}, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
        model = BertForPreTraining(config, VOCAB_SIZE)
        model.initialize(seed)
        return model

    return make


@pytest.fixture
def make_batch() -> Callable[..., SimpleNamespace]:
    """Make one batch twice, packed and padded: `make_batch([7, 3, 24], seed=0)`."""

    def make(lengths: list[int], seed: int = 0) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, size: int) -> torch.Tensor:
            return torch.randint(low, high, (size,), generator=generator)

        num_tokens, rows, width = sum(lengths), len(lengths), max(lengths)
        positions = torch.cat([torch.arange(length) for length in lengths])
        masked = torch.randperm(num_tokens, generator=generator)[: num_tokens // 4].sort().values
        packed = Batch(
            input_ids=draw(FIRST_WORD, VOCAB_SIZE, num_tokens),
            token_type_ids=torch.cat([(torch.arange(length) >= length // 2).long() for length in lengths]),
            position_ids=positions,
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
            masked_positions=masked,
            masked_labels=draw(FIRST_WORD, VOCAB_SIZE, len(masked)),
            next_sentence_labels=draw(0, 2, rows),
            max_seqlen=width,
            num_tokens=num_tokens,
            num_sequences=rows,
            num_predictions=len(masked),
        )
        place = (torch.repeat_interleave(torch.arange(rows), torch.tensor(lengths)), positions)

        def pad(values: torch.Tensor, filler: int = 0) -> torch.Tensor:
            padded = torch.full((rows, width), filler)
            padded[place] = values
            return padded

        labels = torch.full((num_tokens,), -100)
        labels[masked] = packed.masked_labels
        padded = {
            "input_ids": pad(packed.input_ids),
            "token_type_ids": pad(packed.token_type_ids),
            "attention_mask": pad(torch.ones_like(labels)),
            "labels": pad(labels, -100),
            "next_sentence_label": packed.next_sentence_labels,
        }
        return SimpleNamespace(packed=packed, padded=padded, place=place)

    return make


@pytest.fixture
def as_huggingface(tmp_path: Path, tokenizer: Tokenizer) -> Callable[[BertForPreTraining], Any]:
    """Return Hugging Face's model with the weights of ours, by way of the folder we write."""

    def convert(model: BertForPreTraining) -> Any:
        folder = tmp_path / "as_huggingface"
        folder.mkdir(exist_ok=True)
        save_model(model, folder, tokenizer)
        return Peer.from_pretrained(folder, attn_implementation="eager").train()

    return convert

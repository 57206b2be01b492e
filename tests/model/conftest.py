"""Random packed batches of mixed lengths, the same padded, and Hugging Face's model with the same weights."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.text.tokenizer import Tokenizer

VOCAB_SIZE = 150
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    # Wide enough that the logits differ well and a wrong gradient shows.
    "initializer_range": 0.2,
}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    words = [f"word{number}" for number in range(VOCAB_SIZE - 104)]
    tokens = ["[PAD]", *(f"[unused{number}]" for number in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    return Tokenizer(tokens, lowercase=True, strip_accents=None, handle_chinese_chars=True)


@pytest.fixture
def make_model() -> Callable[..., BertForPreTraining]:
    """Make a small model: `make_model(dropout=0.0, seed=1, **sizes)`."""

    def make(dropout: float = 0.0, seed: int = 1, attention: str = "padded", **sizes: Any) -> BertForPreTraining:
        config = ModelConfig(**{**SIZES, **sizes}, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
        model = BertForPreTraining(config, VOCAB_SIZE, attention=attention)
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
        starts = torch.tensor([0, *lengths]).cumsum(0)
        batch = SimpleNamespace(
            input_ids=draw(104, VOCAB_SIZE, num_tokens),
            position_ids=torch.cat([torch.arange(length) for length in lengths]),
            token_type_ids=torch.cat([(torch.arange(length) >= length // 2).long() for length in lengths]),
            cu_seqlens=starts.int(),
            max_seqlen=width,
            masked_positions=torch.randperm(num_tokens, generator=generator)[: num_tokens // 4].sort().values,
            next_sentence_labels=draw(0, 2, rows),
        )
        batch.masked_labels = draw(104, VOCAB_SIZE, len(batch.masked_positions))
        row = torch.repeat_interleave(torch.arange(rows), torch.tensor(lengths))
        place = (row, batch.position_ids)

        def pad(values: torch.Tensor, filler: int) -> torch.Tensor:
            padded = torch.full((rows, width), filler)
            padded[place] = values
            return padded

        labels = torch.full((num_tokens,), -100)
        labels[batch.masked_positions] = batch.masked_labels
        batch.padded = {
            "input_ids": pad(batch.input_ids, 0),
            "token_type_ids": pad(batch.token_type_ids, 0),
            "attention_mask": pad(torch.ones_like(labels), 0),
            "labels": pad(labels, -100),
            "next_sentence_label": batch.next_sentence_labels,
        }
        batch.place = place
        batch.packed = (
            batch.input_ids,
            batch.token_type_ids,
            batch.position_ids,
            batch.cu_seqlens,
            batch.max_seqlen,
        )
        return batch

    return make


@pytest.fixture
def as_huggingface(tmp_path: Path, tokenizer: Tokenizer) -> Callable[[BertForPreTraining], Any]:
    """Return Hugging Face's model with the weights of ours, by way of the folder we write."""

    def convert(model: BertForPreTraining) -> Any:
        from transformers import BertForPreTraining as Peer

        from bert_pretrain.model.huggingface import save_model

        folder = tmp_path / "as_huggingface"
        folder.mkdir(exist_ok=True)
        save_model(model, folder, tokenizer)
        return Peer.from_pretrained(folder, attn_implementation="eager").train()

    return convert

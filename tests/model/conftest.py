"""Small models with the vocabulary of the synthetic language."""

from typing import Any

import pytest

from bert_pretrain.config import ModelConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.text.tokenizer import Tokenizer
from tests.train.conftest import VOCAB_SIZE, make_tokenizer

# The large initializer range makes logits differ, so that wrong gradients show.
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 24, "initializer_range": 0.2,
}  # fmt: skip


def make_model(dropout: float = 0.0, seed: int = 1, **sizes: Any) -> BertForPreTraining:
    config = ModelConfig(**{**SIZES, **sizes}, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    model = BertForPreTraining(config, VOCAB_SIZE)
    model.initialize(seed)
    return model


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()

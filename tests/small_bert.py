"""A small BERT with random weights over a real vocabulary, and sentences for it; no test writes into its folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bert_pretrain.config import ModelConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import save_model
from bert_pretrain.text.tokenizer import Tokenizer

MODEL = ModelConfig(
    hidden_size=16,
    num_hidden_layers=5,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=40,
    # Wide enough that layers, places and words all make a difference.
    initializer_range=0.3,
)


@pytest.fixture(scope="session")
def make_bert(tmp_path_factory: pytest.TempPathFactory, vocab_folder: Path) -> Callable[..., Path]:
    """Write a model folder: `make_bert(num_hidden_layers=2)`."""

    def make(**sizes: object) -> Path:
        tokenizer = Tokenizer.load(vocab_folder)
        model = BertForPreTraining(MODEL.model_copy(update=sizes), tokenizer.vocab_size)
        model.initialize(5)
        folder = tmp_path_factory.mktemp("bert")
        save_model(model, folder, tokenizer)
        return folder

    return make


@pytest.fixture(scope="session")
def bert_folder(make_bert: Callable[..., Path]) -> Path:
    return make_bert()


@pytest.fixture(scope="session")
def sentences(english_documents: list[list[str]]) -> list[str]:
    """Real sentences, some of them longer than the model's positions, and two with what is not ASCII."""
    long = [" ".join(document[:4]) for document in english_documents[:6]]
    return [*(document[1] for document in english_documents[:24]), *long, "naïve café — 中文", "½ ﬁ I"]

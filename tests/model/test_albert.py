"""ALBERT equals Hugging Face's classes with the same weights, and opens their folders."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from bert_pretrain.errors import DataError
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.folder import read_config
from bert_pretrain.model.huggingface import load_model, to_huggingface
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.loss import pretraining_loss
from tests.conftest import save_model
from tests.model.conftest import make_model
from tests.model.test_bert import make_batch
from tests.model.test_huggingface import write

close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


def make_albert(**sizes: Any) -> BertForPreTraining:
    return make_model(**{"architecture": "albert", "num_hidden_layers": 3, "embedding_size": 16, **sizes})


@pytest.mark.parametrize(("embedding_size", "recomputes"), [(16, False), (None, False), (16, True)])
def test_logits_losses_and_gradients_equal_transformers(
    embedding_size: int | None, recomputes: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model, (packed, padded) = make_albert(embedding_size=embedding_size), make_batch(5, seed=0)
    model.encoder.activation_checkpointing = recomputes
    save_model(model, tmp_path, tokenizer)
    peer = transformers.AutoModelForPreTraining.from_pretrained(tmp_path, classifier_dropout_prob=0.0).train()
    is_real = padded["attention_mask"].bool()
    pair_labels = padded.pop("next_sentence_label")  # 0: A and B are in order, as in `sentence_order_label`
    theirs = peer(**padded, sentence_order_label=pair_labels, output_hidden_states=True)

    features, order_logits, _ = model(packed.sequences, packed.masked_positions)
    close(model.decode(features), theirs.prediction_logits[is_real][packed.masked_positions])
    close(order_logits, theirs.sop_logits)
    last_two = torch.cat([states[is_real] for states in theirs.hidden_states[-2:]], dim=1)
    close(model.encode(packed.sequences, num_last=2), last_two)
    sums = pretraining_loss(model, packed)
    close(sums.mean(packed.num_predictions, packed.num_sequences), theirs.loss)
    close(sums.nsp_loss / packed.num_sequences, cross_entropy(theirs.sop_logits, pair_labels))
    sums.mean(packed.num_predictions, packed.num_sequences).backward()
    theirs.loss.backward()
    ours = to_huggingface({name: weight.grad for name, weight in model.named_parameters()}, "albert")
    expected = {name: weight.grad for name, weight in peer.named_parameters()}
    assert ours.keys() == expected.keys()
    close(ours, expected)


def test_all_classes_of_transformers_open_the_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model, (packed, padded) = make_albert(), make_batch(3, seed=1)
    (tmp_path / "ours").mkdir()
    save_model(model, tmp_path / "ours", tokenizer)
    hidden = model.encode(packed.sequences)
    inputs = {name: padded[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    for task in ("", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"):
        peer = getattr(transformers, f"Albert{task or 'Model'}").from_pretrained(tmp_path / "ours").eval()
        states = (peer.albert if task else peer)(**inputs)
        close(states.last_hidden_state[padded["attention_mask"].bool()], hidden)
        if states.pooler_output is not None:
            close(states.pooler_output, model.pooler(hidden, packed.cu_seqlens))
        peer.save_pretrained(tmp_path / task)
        tokenizer.save(tmp_path / task)
        loaded = load_model(tmp_path / task).model
        assert loaded.config == model.config
        close(loaded.encode(packed.sequences), hidden)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "gelu_new"}, "gelu_new"),
        ({"num_hidden_groups": 2}, "num_hidden_groups"),
        ({"inner_group_num": 2}, "inner_group_num"),
        ({"embedding_size": 64}, "embedding_size 64 is above hidden_size 32"),
        ({"embedding_size": 8}, "shape"),
        ({"model_type": "bert"}, "bert.embeddings"),
    ],
)
def test_folders_of_other_networks_are_refused(
    change: dict[str, Any], reason: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_model(make_albert(), tmp_path, tokenizer)
    write("config.json", {"classifier_dropout_prob": 0.1, "down_scale_factor": 1, "net_structure_type": 0})(tmp_path)
    assert read_config(tmp_path, "MODEL")[0] == make_albert().config
    write("config.json", change)(tmp_path)
    with pytest.raises(DataError, match=reason):
        read_config(tmp_path, "MODEL")

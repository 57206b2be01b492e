"""The model equals Hugging Face's `BertForPreTraining` with the same weights."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForPreTraining as Peer

from bert_pretrain.config import TrainConfig
from bert_pretrain.examples.padded import pad
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import to_huggingface
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.loss import pretraining_loss
from bert_pretrain.train.optimizers import make_optimizers
from bert_pretrain.train.packing import Batch, pack
from tests.conftest import save_model
from tests.model.conftest import make_model
from tests.train.conftest import make_examples


def our_loss(model: Any, batch: Batch) -> torch.Tensor:
    return pretraining_loss(model, batch).mean(batch.num_predictions, batch.num_sequences)


def make_batch(rows: int, seed: int) -> tuple[Batch, dict[str, torch.Tensor]]:
    """Return the same batch packed and padded."""
    examples = make_examples(rows, seed, max_seq_length=24)
    return pack(examples), pad(examples, 0, int(examples.lengths.max()))


@pytest.fixture
def as_huggingface(tmp_path: Path, tokenizer: Tokenizer) -> Callable[[BertForPreTraining], Any]:
    """Return a function that saves our model and loads it with Hugging Face."""

    def convert(model: BertForPreTraining) -> Any:
        save_model(model, tmp_path, tokenizer)
        return Peer.from_pretrained(tmp_path, attn_implementation="eager").train()

    return convert


def test_logits_losses_and_gradients_equal_transformers(as_huggingface: Any) -> None:
    model, (packed, padded) = make_model(), make_batch(5, seed=0)
    peer, is_real = as_huggingface(model), padded["attention_mask"].bool()
    theirs = peer(**padded, output_hidden_states=True)
    close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    hidden, two_layers = model.encode(packed.sequences), model.encode(packed.sequences, num_last=2)
    their_hidden = [states[is_real] for states in theirs.hidden_states]
    close(hidden, their_hidden[-1])
    close(two_layers, torch.cat(their_hidden[-2:], dim=1))
    features, nsp_logits, _ = model(packed.sequences, packed.masked_positions)
    their_logits = theirs.prediction_logits[is_real][packed.masked_positions]
    close(model.decode(features), their_logits)
    close(nsp_logits, theirs.seq_relationship_logits)
    mlm_loss = torch.nn.functional.cross_entropy(their_logits, packed.masked_labels)
    close(pretraining_loss(model, packed).mlm_loss / packed.num_predictions, mlm_loss)
    ours = our_loss(model, packed)
    close(ours, theirs.loss)

    ours.backward()
    theirs.loss.backward()
    our_gradients = to_huggingface({name: p.grad for name, p in model.named_parameters()}, "bert")
    their_gradients = {name: p.grad for name, p in peer.named_parameters()}
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        close(our_gradients[name], gradient, msg=lambda m, n=name: f"{n}: {m}")


def test_twenty_adamw_steps_equal_transformers(as_huggingface: Any) -> None:
    model = make_model(initializer_range=0.02)
    peer = as_huggingface(model)
    config = TrainConfig(peak_lr=1e-3)
    (ours,) = make_optimizers(model, config)
    exempt = ("bias", "LayerNorm.weight")
    groups = [
        {"params": [p for n, p in peer.named_parameters() if n.endswith(exempt) == is_exempt], "weight_decay": decay}
        for is_exempt, decay in ((False, config.weight_decay), (True, 0.0))
    ]
    theirs = torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps)
    for step in range(20):
        packed, padded = make_batch(5 if step % 2 else 3, seed=step)
        our_value, their_value = our_loss(model, packed), peer(**padded).loss
        assert abs(our_value.item() - their_value.item()) < 1e-4
        for optimizer, loss, network in ((ours, our_value, model), (theirs, their_value, peer)):
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
    final = to_huggingface({name: p.detach() for name, p in model.named_parameters()}, "bert")
    for name, parameter in peer.named_parameters():
        torch.testing.assert_close(final[name], parameter.detach(), atol=1e-4, rtol=0.0)


def test_initial_weights_are_truncated_normal_and_depend_only_on_the_seed() -> None:
    first, again, other = make_model(seed=1), make_model(seed=1), make_model(seed=2)
    deviation = first.config.initializer_range
    for (name, weight), same, different in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(weight, same)
        if weight.dim() == 2:
            assert not torch.equal(weight, different)
            assert weight.abs().max() <= 2 * deviation
            assert abs(weight.mean()) < 5 * deviation / math.sqrt(weight.numel())
        else:
            assert torch.equal(weight, torch.full_like(weight, float(name.endswith("norm.weight"))))

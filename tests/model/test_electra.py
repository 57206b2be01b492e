"""Both networks of ELECTRA and their loss equal Hugging Face's classes with the same weights."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bert_pretrain.config import ModelConfig
from bert_pretrain.errors import DataError
from bert_pretrain.model.architectures import GENERATOR_PARTS
from bert_pretrain.model.bert import ElectraForPreTraining
from bert_pretrain.model.huggingface import (
    export_weights,
    load_model,
    load_weights,
    save_generator,
    save_model_folder,
    to_huggingface,
)
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.electra import ElectraLoss, draw_tokens
from bert_pretrain.train.loss import Counts
from tests.model.conftest import SIZES
from tests.model.test_bert import make_batch
from tests.train.conftest import NO_DROPOUT, VOCAB_SIZE

close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
PRETRAINING = {"max_seq_length": 24}


def make_electra(**sizes: Any) -> ElectraForPreTraining:
    config = ModelConfig(**{**SIZES, **NO_DROPOUT, "architecture": "electra", **sizes})
    model = ElectraForPreTraining(config, VOCAB_SIZE)
    model.initialize(1)
    with torch.no_grad():  # so that `export_weights` does not scale them, nor their gradients
        for name in ("word", "position", "token_type"):
            getattr(model.embeddings, f"{name}_embeddings").weight.mul_(0.2)
    return model


def save(model: ElectraForPreTraining, folder: Path, tokenizer: Tokenizer) -> None:
    """Write the folders `model` and `generator`."""
    exported = export_weights({name: weight.detach() for name, weight in model.named_parameters()}, "electra")
    for name in ("model", "generator"):
        (folder / name).mkdir()
    save_model_folder(exported.weights, model, folder / "model", tokenizer, PRETRAINING)
    save_generator(exported, model, folder / "generator", tokenizer, PRETRAINING)


@pytest.mark.parametrize(("embedding_size", "generator_size"), [(16, 0.25), (None, 0.5), (16, 0.5), (None, 1.0)])
def test_logits_loss_and_gradients_equal_transformers(
    embedding_size: int | None, generator_size: float, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = make_electra(embedding_size=embedding_size, generator_size=generator_size)
    losses = ElectraLoss(model, 50.0).train()
    packed, padded = make_batch(5, seed=0)
    packed = dataclasses.replace(packed, draws=torch.linspace(0.0, 0.99, packed.num_predictions))
    save(model, tmp_path, tokenizer)
    generator = transformers.ElectraForMaskedLM.from_pretrained(tmp_path / "generator").train()
    discriminator = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "model").train()
    labels, _ = padded.pop("labels"), padded.pop("next_sentence_label")
    is_real = padded["attention_mask"].bool()

    features = model(packed.sequences, packed.masked_positions).mlm_features
    replaced_ids, is_replaced = losses.replace(packed, features)
    sums = losses(packed)
    counts = Counts(*(torch.tensor(number) for number in (packed.num_predictions, 1, packed.num_tokens)))
    loss = losses.mean(sums, counts)
    loss.backward()

    generated = generator(**padded, labels=labels)
    close(model.decode(features), generated.logits[is_real][packed.masked_positions])
    padded["input_ids"] = padded["input_ids"].masked_scatter(is_real, replaced_ids)
    replaced = torch.zeros_like(labels)
    replaced[is_real] = is_replaced.long()
    judged = discriminator(**padded, labels=replaced)
    close(model.discriminate(packed.sequences._replace(input_ids=replaced_ids)), judged.logits[is_real])
    close(sums.extras[0] / packed.num_tokens, judged.loss)
    close(loss, generated.loss + 50.0 * judged.loss)
    (generated.loss + 50.0 * judged.loss).backward()

    theirs = {name: weight.grad for name, weight in discriminator.named_parameters()}
    of_generator = {name: weight.grad for name, weight in generator.named_parameters()}
    for name in theirs.keys() & of_generator.keys():
        if name.startswith("electra.embeddings."):
            theirs[name] = theirs[name] + of_generator.pop(name)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    ours = {name: gradients.pop(name) for name in list(gradients) if name.startswith(GENERATOR_PARTS)}
    close(to_huggingface(ours, "electra"), of_generator)
    gradients = to_huggingface(gradients, "electra")
    for each in (gradients, theirs):
        each["electra.embeddings.word_embeddings.weight"][0] = 0.0  # theirs is not that of a drawn [PAD]
    close(gradients, theirs, rtol=1e-4)
    flagged = judged.logits[is_real] > 0
    found, originals = flagged[is_replaced].sum(), (~is_replaced).sum()
    assert list(sums.extras[1:]) == [is_replaced.sum(), found, originals, flagged.sum() - found]


def test_every_class_of_transformers_opens_the_folders_and_we_open_theirs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_electra(embedding_size=16, generator_size=0.5)
    save(model, tmp_path, tokenizer)
    packed, padded = make_batch(3, seed=1)
    hidden = model.encode(packed.sequences)
    inputs = {name: padded[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    for task in ("", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"):
        peer = getattr(transformers, f"Electra{task or 'Model'}").from_pretrained(tmp_path / "model").eval()
        states = (peer.electra if task else peer)(**inputs).last_hidden_state
        close(states[padded["attention_mask"].bool()], hidden)
        peer.save_pretrained(tmp_path / "theirs")
        tokenizer.save(tmp_path / "theirs")
        loaded = load_model(tmp_path / "theirs").model
        assert loaded.config == model.config
        close(loaded.encode(packed.sequences), hidden)
    loaded = load_model(tmp_path / "generator", required=("mlm_head",)).model
    inputs = (packed.sequences, packed.masked_positions)
    close(loaded.decode(loaded(*inputs).mlm_features), model.decode(model(*inputs).mlm_features))
    with pytest.raises(DataError, match="discriminator, which has no head for masked tokens") as caught:
        load_model(tmp_path / "model", required=("mlm_head",))
    assert "generator" in caught.value.remedy


def test_training_reads_both_folders(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_electra(embedding_size=16)
    save(model, tmp_path, tokenizer)
    again = ElectraForPreTraining(model.config, VOCAB_SIZE)
    assert load_weights(again, tmp_path / "model", flag="MODEL", seed=2) == ([], {})
    close(dict(again.named_parameters()), dict(model.named_parameters()), atol=0.0, rtol=0.0)
    (tmp_path / "generator").rename(tmp_path / "elsewhere")
    missing, _ = load_weights(again, tmp_path / "model", flag="MODEL", seed=2)
    assert all(name.startswith(("generator.", "mlm_head.")) for name in missing)
    assert missing


def test_tokens_are_drawn_from_the_softmax() -> None:
    logits = torch.tensor([0.0, 2.0, -torch.inf, 1.0])
    numbers = torch.linspace(0.0, 1.0, 20_001)[:-1]
    drawn = draw_tokens(torch.ones(20_000, 1), logits[:, None], torch.zeros(4), numbers)
    close(drawn.bincount(minlength=4) / 20_000, logits.softmax(dim=0), atol=1e-4, rtol=0.0)

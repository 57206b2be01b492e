"""ModernBERT equals Hugging Face's classes with the same weights, in windows, rotations, losses and gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bert_pretrain.model.bert import BertForPreTraining, Packed
from bert_pretrain.model.huggingface import load_model, to_huggingface
from bert_pretrain.text.tokenizer import Tokenizer
from tests.conftest import save_model
from tests.model.conftest import make_model
from tests.train.conftest import VOCAB_SIZE


def make_modern(**sizes: Any) -> BertForPreTraining:
    """Return four layers, of which the first and the last are global, without weights that are 0 or 1."""
    layers = {"num_hidden_layers": 4, "max_position_embeddings": 1024, "local_attention": 16, "layer_norm_eps": 1e-5}
    model = make_model(**{"architecture": "modernbert", **layers, **sizes})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return model


def make_inputs(lengths: list[int]) -> tuple[Packed, dict[str, torch.Tensor]]:
    """Return the same sequences packed and padded."""
    ids = torch.randint(5, VOCAB_SIZE, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = Packed(ids, torch.zeros_like(ids), positions, bounds.int(), max(lengths))
    padded = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    padded[mask] = ids
    return packed, {"input_ids": padded, "attention_mask": mask.long()}


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("lengths", [[16, 3, 9], [128, 57, 128], [1024, 300]])
def test_logits_loss_and_gradients_equal_transformers(
    biases: bool, lengths: list[int], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = make_modern(biases=biases)
    save_model(model, tmp_path, tokenizer)
    peer = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    packed, padded = make_inputs(lengths)
    labels = torch.roll(packed.input_ids, 1)
    is_token = padded["attention_mask"].bool()

    logits = model.decode(model(packed, torch.arange(len(packed.input_ids))).mlm_features)
    theirs = peer(**padded).logits[is_token]
    torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=1e-4)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    their_loss = torch.nn.functional.cross_entropy(theirs, labels)
    torch.testing.assert_close(loss, their_loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    their_loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    their_gradients = {name: weight.grad for name, weight in peer.named_parameters()}
    ours = to_huggingface(gradients, "modernbert")
    assert ours.keys() == their_gradients.keys()
    torch.testing.assert_close(ours, their_gradients, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_logits_of_8192_tokens_equal_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = {"max_position_embeddings": 8192, "local_attention": 128, "global_rope_theta": 160_000.0}
    model = make_modern(hidden_size=32, num_hidden_layers=2, **long)
    save_model(model, tmp_path, tokenizer)
    packed, padded = make_inputs([8192])
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)(**padded).logits[0]
    ours = model.decode(model(packed, torch.arange(8192)).mlm_features)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_token_beyond_the_window_changes_only_global_layers() -> None:
    packed, _ = make_inputs([64])
    changed = packed.input_ids.clone()
    changed[60] = (changed[60] + 1) % VOCAB_SIZE
    model = make_modern(num_hidden_layers=2).eval()
    for is_global in (True, False):
        for layer in model.encoder.layers:
            layer.attention.is_global = is_global
        before, after = (model.encode(packed._replace(input_ids=ids))[:20] for ids in (packed.input_ids, changed))
        assert torch.equal(before, after) is not is_global


@pytest.mark.parametrize("local_attention", [2, 7, 16])
def test_flash_attention_gets_the_windows_and_turned_heads(local_attention: int, monkeypatch) -> None:
    """Windows of flash attention include their ends: (w, w) are w tokens before a token, itself, and w behind it."""
    packed, _ = make_inputs([40, 1, 23])
    windows = []

    def flash(query: Any, key: Any, value: Any, bounds: Any, *_: Any, window_size: Any = (-1, -1)) -> Any:
        windows.append(window_size)
        positions = torch.arange(len(query))
        sequences = torch.searchsorted(bounds, positions, right=True)
        distances = positions - positions[:, None]  # (queries, keys)
        left, right = (len(query) if size < 0 else size for size in window_size)
        is_seen = (sequences == sequences[:, None]) & (distances >= -left) & (distances <= right)
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, value)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    padded = make_modern(local_attention=local_attention)
    packed_model = BertForPreTraining(padded.config, VOCAB_SIZE, attention="varlen")
    packed_model.load_state_dict(padded.state_dict())
    outputs = [model.encode(packed) for model in (packed_model, padded)]
    width = local_attention // 2
    assert windows == [(-1, -1), (width, width), (width, width), (-1, -1)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


def test_all_classes_of_transformers_open_the_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_modern()
    (tmp_path / "ours").mkdir()
    save_model(model, tmp_path / "ours", tokenizer)
    packed, padded = make_inputs([40, 7])
    hidden = model.encode(packed)
    for task in ("", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"):
        peer = getattr(transformers, f"ModernBert{task or 'Model'}").from_pretrained(tmp_path / "ours").eval()
        theirs = (peer.model if task else peer)(**padded).last_hidden_state[padded["attention_mask"].bool()]
        torch.testing.assert_close(hidden, theirs, atol=1e-4, rtol=1e-4)
    peer = transformers.ModernBertForMaskedLM.from_pretrained(tmp_path / "ours")
    peer.save_pretrained(tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs").model
    assert loaded.config == model.config
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), atol=0.0, rtol=0.0)

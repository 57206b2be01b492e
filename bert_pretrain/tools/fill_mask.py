"""`fill-mask`: the most likely words for each [MASK] of a text, by any BERT folder with its tokenizer."""

from pathlib import Path

import torch

from bert_pretrain.errors import DataError, InputError
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.tokenizer import Tokenizer
from bert_pretrain.train.hardware import choose_device

MASK = "[MASK]"


def fill_mask(model: Path, text: str, *, top_k: int = 5, device: str = "auto") -> list[list[tuple[str, float]]]:
    """Return, for each [MASK] in the text, the `top_k` likeliest tokens with their probabilities, likeliest first.

    Several masks are filled independently of one another, as BERT predicts them.

    Raises:
        InputError: when the text has no [MASK], or is longer than the model's positions.
        DataError: when the folder holds no BERT, or its tokenizer does not fit.
    """
    tokenizer = Tokenizer.load(model, "MODEL")
    required = ("bert.embeddings", "bert.encoder", "cls.predictions")
    network = load_model(model, device=choose_device(device), required=required).model
    if tokenizer.vocab_size != network.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {network.vocab_size}",
            where=str(model),
            remedy="put the model's own vocab.txt there",
        )
    input_ids = encode_with_masks(text, tokenizer)
    longest = network.config.max_position_embeddings
    if len(input_ids) > longest:
        raise InputError(
            f"the text has {len(input_ids)} tokens, the model has {longest} positions",
            where="TEXT",
            remedy="shorten it",
        )
    masks = [position for position, token in enumerate(input_ids) if token == tokenizer.mask_id]
    probabilities = _probabilities(network, input_ids, masks)  # (masks, vocabulary)
    best = probabilities.topk(min(top_k, tokenizer.vocab_size), dim=1)
    return [
        [(tokenizer.tokens[token], share) for token, share in zip(tokens, shares, strict=True)]
        for tokens, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def encode_with_masks(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of `[CLS] text [SEP]`, where each literal [MASK] is the special token.

    Raises:
        InputError: when there is none.
    """
    pieces = text.split(MASK)
    if len(pieces) == 1:
        raise InputError(
            f"the text has no {MASK}: {text[:60]!r}",
            where="TEXT",
            remedy=f"put {MASK} where a word is to be found, for example 'The capital of France is {MASK}.'",
        )
    ids = [tokenizer.cls_id]
    for number, piece in enumerate(pieces):
        ids += [tokenizer.mask_id] if number else []
        ids += tokenizer.encode_text(piece)
    return [*ids, tokenizer.sep_id]


@torch.inference_mode()
def _probabilities(model: BertForPreTraining, input_ids: list[int], masks: list[int]) -> torch.Tensor:
    """Return the distribution at each masked position, (masks, vocabulary) fp32 on the CPU."""
    device = next(model.parameters()).device
    ids = torch.tensor(input_ids, device=device)
    features, _ = model(
        ids,
        torch.zeros_like(ids),
        torch.arange(len(input_ids), device=device),
        torch.tensor([0, len(input_ids)], dtype=torch.int32, device=device),
        len(input_ids),
        torch.tensor(masks, device=device),
    )
    return model.decode(features).float().softmax(dim=1).cpu()

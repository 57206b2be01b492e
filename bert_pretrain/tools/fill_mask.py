"""`fill-mask`: the most likely tokens for each [MASK] of a text, by any BERT folder with its tokenizer."""

import json
from pathlib import Path

import numpy as np
import torch
from rich.cells import cell_len

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import InputError
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.inference import open_bert
from bert_pretrain.tools.texts import UnknownWords

MASK = "[MASK]"

Answers = list[list[tuple[str, float]]]
"""Tokens with their probabilities for each [MASK], the most likely first."""


def fill_mask(model: Path, text: str, *, config: TrainConfig, top_k: int = 5) -> Answers:
    """Return the `top_k` most likely tokens for each [MASK] in the text.

    Several masks are filled independently of one another, as BERT predicts them.
    """
    bert = open_bert(model, config, ("cls.predictions",))
    tokenizer = bert.tokenizer
    input_ids = encode_with_masks(text, tokenizer)
    if len(input_ids) > bert.max_length:
        what = f"the text has {len(input_ids)} tokens, the model has {bert.max_length} positions"
        raise InputError(what, where="TEXT", remedy="shorten it")
    masks = np.flatnonzero(input_ids == tokenizer.mask_id)
    with bert.running():
        output = bert.network(*bert.pack([input_ids]), torch.from_numpy(masks).to(bert.device))
        probabilities = bert.network.decode(output.mlm_features).float().softmax(dim=1).cpu()  # (masks, vocabulary)
    # Rows beyond the vocabulary are part of the softmax, but have no token to show.
    best = probabilities[:, : tokenizer.vocab_size].topk(min(top_k, tokenizer.vocab_size), dim=1)
    return [
        [(tokenizer.tokens[token], share) for token, share in zip(tokens, shares, strict=True)]
        for tokens, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def filled(text: str, answers: Answers) -> str:
    """Return the text with the most likely token in every [MASK]; a `##…` is joined to the text before it."""
    head, *pieces = text.split(MASK)
    for found, piece in zip(answers, pieces, strict=True):
        best, _ = found[0]
        head = (head.rstrip() + best.removeprefix("##") if best.startswith("##") else head + best) + piece
    return head


def as_table(text: str, answers: Answers) -> str:
    """Return the answers as a table, a line per token with its mask and probability, and the filled text."""
    width = max(len("token"), *(cell_len(token) for found in answers for token, _ in found))
    lines = [f"mask  {'token':<{width}}  probability"]
    for number, found in enumerate(answers, start=1):
        for rank, (token, share) in enumerate(found):
            label = "" if rank else str(number)
            lines.append(f"{label:<6}{token}{' ' * (width - cell_len(token))}  {share:>11.2%}")
    return "\n".join([*lines, "", filled(text, answers)])


def as_json(text: str, answers: Answers) -> str:
    """Return the answers as JSON: the text, the filled text, and for each mask its tokens."""
    masks = [[{"token": token, "probability": share} for token, share in found] for found in answers]
    return json.dumps({"text": text, "filled": filled(text, answers), "masks": masks}, ensure_ascii=False)


def encode_with_masks(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of `[CLS] text [SEP]`, where each literal [MASK] is the special token; warn of unknown words."""
    if MASK not in text:
        remedy = f"put {MASK} where a word is missing, for example 'The capital of France is {MASK}.'"
        raise InputError(f"the text has no {MASK}: {text[:60]!r}", where="TEXT", remedy=remedy)
    ids, unknown = [tokenizer.cls_id], UnknownWords(tokenizer)
    for number, piece in enumerate(text.split(MASK)):
        found = tokenizer.encode_text(piece)
        unknown.add(piece, found)
        ids += [tokenizer.mask_id] * (number > 0) + found
    unknown.warn(0.0)
    return np.array([*ids, tokenizer.sep_id])

"""`fill-mask`: predict the most likely tokens for each [MASK] of a text."""

import json
from pathlib import Path

import numpy as np
import torch
from rich.cells import cell_len
from torch import Tensor

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import InputError
from bert_pretrain.examples.examples import Examples
from bert_pretrain.model.bert import Packed
from bert_pretrain.model.sequences import open_bert, sequences_of
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.texts import UnknownWords

MASK = "[MASK]"

Answers = list[list[tuple[str, float]]]  # for each [MASK], tokens and their probabilities, the most likely first


def fill_mask(
    model: Path,
    text: str,
    *,
    config: TrainConfig,
    top_k: int = 5,
) -> Answers:
    """Return the `top_k` most likely tokens for each [MASK]. Masks are filled independently of each other."""
    bert = open_bert(model, config, ("mlm_head",))
    tokenizer = bert.tokenizer
    input_ids = encode_with_masks(text, tokenizer)
    bert.check_length(len(input_ids), "the text", where="TEXT", remedy="shorten it")
    masks = np.flatnonzero(input_ids == tokenizer.mask_id)

    def head(packed: Packed, _: Examples) -> Tensor:
        output = bert.network(packed, torch.from_numpy(masks).to(bert.device))
        return bert.network.decode(output.mlm_features).float().softmax(dim=1)  # (masks, vocabulary)

    probabilities = torch.from_numpy(bert.run(sequences_of([input_ids]), head, np.array([len(masks)])))
    # Rows that pad the vocabulary are part of the softmax, but have no token to show.
    shown = probabilities[:, : tokenizer.vocab_size]
    answers = []
    for row in shown:
        best = row.topk(min(top_k, len(row)))
        tokens = [tokenizer.text_of(index) for index in best.indices.tolist()]
        answers.append(list(zip(tokens, best.values.tolist(), strict=True)))
    return answers


def filled(text: str, answers: Answers) -> str:
    """Replace each [MASK] by its most likely token. A `##` piece is joined to the text before it."""
    head, *pieces = text.split(MASK)
    for candidates, piece in zip(answers, pieces, strict=True):
        best, _ = candidates[0]
        head = head.rstrip() if best.startswith("##") else head
        head += best.removeprefix("##") + piece
    return head


def as_table(text: str, answers: Answers) -> str:
    """Return a table with a line for each mask, token and probability, and then the filled text."""
    width = max(len("token"), *(cell_len(token) for candidates in answers for token, _ in candidates))
    lines = [f"mask  {'token':<{width}}  probability"]
    for number, candidates in enumerate(answers, start=1):
        for rank, (token, probability) in enumerate(candidates):
            label = "" if rank else str(number)
            lines.append(f"{label:<6}{token}{' ' * (width - cell_len(token))}  {probability:>11.2%}")
    return "\n".join([*lines, "", filled(text, answers)])


def as_json(text: str, answers: Answers) -> str:
    """Return JSON with the text, the filled text, and the tokens of each mask."""
    masks = [[{"token": token, "probability": share} for token, share in candidates] for candidates in answers]
    return json.dumps({"text": text, "filled": filled(text, answers), "masks": masks}, ensure_ascii=False)


def encode_with_masks(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of `[CLS] text [SEP]`, with each literal [MASK] as the special token. Warn of unknown words."""
    if MASK not in text:
        raise InputError(
            f"the text has no {MASK}: {text[:60]!r}",
            where="TEXT",
            remedy=f"put {MASK} where a word is missing, for example 'The capital of France is {MASK}.'",
        )
    ids: list[int] = []
    unknown_words = UnknownWords(tokenizer)
    *before, last = text.split(MASK)
    for piece in (*map(str.rstrip, before), last):  # [MASK] also replaces the blank before a word
        piece_ids = tokenizer.encode_text(piece)
        unknown_words.add(piece, piece_ids)
        ids += [*piece_ids, tokenizer.mask_id]
    unknown_words.warn(0.0)
    return np.array([tokenizer.cls_id, *ids[:-1], tokenizer.sep_id])  # no [MASK] after the last piece

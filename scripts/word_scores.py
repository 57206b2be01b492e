"""Score BERT folders by a metric that compares across vocabularies: nats per byte of masked words.

The words are chosen from plain text, before it is tokenized, so all models predict the same words in the same contexts.
All pieces of a chosen word are masked, and the word costs the sum over its pieces. `transformers` opens the folders. A
word that becomes [UNK] costs the entropy of uniform bytes.

Pieces that are masked together are predicted independently, which favours vocabularies with few words of several
pieces. With `--by-piece` each piece is predicted with those before it in its word shown (Kauf and Ivanova, 2023), so
that the costs add up to the probability of the word.

    python scripts/word_scores.py TEXT MODEL [MODEL ...] [--by-piece]
"""

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForPreTraining, AutoTokenizer

from bert_pretrain.rng import stream

MASKED_SHARE = 0.15
MOST_CHARACTERS = {"latin": 130, "cjk": 44}
"""Characters of a context."""
MOST_TOKENS = 60
"""A context that could have more pieces, were every third character a piece of its own, is left out."""
BATCH = 32
CJK = "\u3400-\u4dbf\u4e00-\u9fff"
TOKENS = re.compile(rf"[{CJK}]|[^\W{CJK}]+|[^\w\s]")
NATS_OF_A_BYTE = math.log(256)


@dataclass(frozen=True)
class Context:
    """Consecutive words of one document, and which of them are masked."""

    words: tuple[str, ...]
    masked: tuple[int, ...]


def contexts(text: Path, number: int, seed: int = 0) -> list[Context]:
    """Return `number` contexts from documents (sentence lines, blank lines between), spread over all of them."""
    rng = stream(seed, "masked words")
    found: list[Context] = []
    documents = list(_documents(text))
    share = max(1, math.ceil(1.2 * number / len(documents)))
    for words in documents:
        starts = rng.permutation(max(1, len(words) - 20))[:share]
        found += [context for start in starts if (context := _context(words, int(start), rng)) is not None]
    order = rng.permutation(len(found))[:number]
    return [found[place] for place in sorted(order)]


def _documents(text: Path) -> Iterator[list[str]]:
    for document in text.read_text(encoding="utf-8").split("\n\n"):
        words = TOKENS.findall(document)
        if len(words) > 20:
            yield words


def _context(words: Sequence[str], start: int, rng: np.random.Generator) -> Context | None:
    kind = "cjk" if re.search(f"[{CJK}]", "".join(words[start : start + 10])) else "latin"
    end, size = start, 0
    while end < len(words) and size + len(words[end]) + 1 <= MOST_CHARACTERS[kind]:
        size += len(words[end]) + (kind == "latin")
        end += 1
    chosen = [place for place, word in enumerate(words[start:end]) if word[0].isalnum()]
    count = round(MASKED_SHARE * len(chosen))
    if not count or sum(-(-len(word) // 3) for word in words[start:end]) > MOST_TOKENS:
        return None
    return Context(tuple(words[start:end]), tuple(sorted(rng.choice(chosen, count, replace=False).tolist())))


@torch.no_grad()
def nats_per_byte(folder: Path, asked: Sequence[Context], *, by_piece: bool = False) -> float:
    """Return what a byte of a masked word costs a model, in nats.

    Args:
        folder: of the model.
        asked: contexts with masked words.
        by_piece: show the pieces before the predicted one.

    Raises:
        ValueError: when a context does not fit into the model's positions.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForPreTraining.from_pretrained(folder).eval()
    total, size = 0.0, 0
    for first in range(0, len(asked), BATCH):
        batch = asked[first : first + BATCH]
        encoded = [each for context in batch for each in _encode(context, tokenizer, by_piece)]
        longest = max(len(ids) for ids, _, _ in encoded)
        if longest > model.config.max_position_embeddings:
            raise ValueError(f"{folder}: a context has {longest} tokens, more than the model has positions")
        ids = torch.full((len(encoded), longest), tokenizer.pad_token_id)
        for row, (own, _, _) in enumerate(encoded):
            ids[row, : len(own)] = torch.tensor(own)
        logits = model(input_ids=ids, attention_mask=ids != tokenizer.pad_token_id).prediction_logits
        for row, (_, places, labels) in enumerate(encoded):
            shares = logits[row, places].double().log_softmax(dim=1)
            costs = -shares[torch.arange(len(places)), labels]
            total += float(costs[torch.tensor(labels) != tokenizer.unk_token_id].sum())
        for context in batch:
            for place in context.masked:
                word = context.words[place]
                size += len(word.encode())
                if tokenizer.unk_token_id in tokenizer.encode(word, add_special_tokens=False):
                    total += NATS_OF_A_BYTE * len(word.encode())
    return total / size


def _encode(context: Context, tokenizer: Any, by_piece: bool) -> list[tuple[list[int], list[int], list[int]]]:
    """Return the ids with masks, the places that are predicted, and the ids that were there.

    Once, or by piece: the first pieces of all masked words, then the second ones with the first ones shown, and so on.
    """
    words = [tokenizer.encode(word, add_special_tokens=False) for word in context.words]
    passes = max(len(words[number]) for number in context.masked) if by_piece else 1
    found = []
    for shown in range(passes):
        ids: list[int] = [tokenizer.cls_token_id]
        places: list[int] = []
        labels: list[int] = []
        for number, pieces in enumerate(words):
            if number in context.masked:
                last = shown + 1 if by_piece else len(pieces)
                places += range(len(ids) + shown, len(ids) + min(last, len(pieces)))
                labels += pieces[shown:last]
                pieces = pieces[:shown] + [tokenizer.mask_token_id] * (len(pieces) - shown)
            ids += pieces
        found.append(([*ids, tokenizer.sep_token_id], places, labels))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", type=Path, help="held-out documents: a sentence a line, blank lines between documents")
    parser.add_argument("models", type=Path, nargs="+", help="BERT folders")
    parser.add_argument("--contexts", type=int, default=2000)
    parser.add_argument("--by-piece", action="store_true", help="show the pieces of a word before the predicted one")
    options = parser.parse_args()
    asked = contexts(options.text, options.contexts)
    words = sum(len(context.masked) for context in asked)
    print(f"{len(asked):,} contexts, {words:,} masked words")
    for model in options.models:
        print(f"{nats_per_byte(model, asked, by_piece=options.by_piece):.4f} nats per byte of masked words  {model}")


if __name__ == "__main__":
    main()

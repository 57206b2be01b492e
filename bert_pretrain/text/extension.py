"""An extended vocabulary compared with the one before: which tokens are new, and which old pieces each consists of.

Every old token keeps its id; new ones take unused slots, then ids after the end. So the two lists of tokens are
enough, and `vocab --extend` passes nothing else to `train --init-from`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bert_pretrain.text.tokenizer_folder import MAX_WORD_CHARACTERS, UNKNOWN, is_unused

_PREFIX = "##"


@dataclass(frozen=True)
class Extension:
    """How the rows of a vocabulary become those of a longer one; with no new tokens, all rows stay."""

    num_old_tokens: int
    num_tokens: int
    pieces: dict[int, list[int]]
    """The id of each new token -> the ids of its old pieces, in order."""

    @property
    def num_in_slots(self) -> int:
        """How many new tokens took unused slots."""
        return sum(index < self.num_old_tokens for index in self.pieces)


def find_extension(old: Sequence[str], new: Sequence[str]) -> Extension | None:
    """Return how `new` extends `old`, or None where it is another vocabulary."""
    if len(new) < len(old):
        return None
    changed = [index for index, token in enumerate(old) if new[index] != token]
    if not all(is_unused(old[index]) for index in changed):
        return None
    ids = {token: index for index, token in enumerate(old)}
    added = [*changed, *range(len(old), len(new))]
    return Extension(len(old), len(new), {index: old_pieces(new[index], ids) for index in added})


def old_pieces(token: str, ids: Mapping[str, int]) -> list[int]:
    """Return the ids of the pieces into which a vocabulary cuts a token it lacks, longest match first.

    A token it cannot cut is one [UNK], as WordPiece has it.
    """
    is_inside = token.startswith(_PREFIX) and len(token) > len(_PREFIX)
    rest = token.removeprefix(_PREFIX) if is_inside else token
    unknown = [ids[UNKNOWN]]
    if len(rest) > MAX_WORD_CHARACTERS:
        return unknown
    pieces = []
    while rest:
        prefix = _PREFIX if is_inside else ""
        length = next((size for size in range(len(rest), 0, -1) if prefix + rest[:size] in ids), 0)
        if not length:
            return unknown
        pieces.append(ids[prefix + rest[:length]])
        rest, is_inside = rest[length:], True
    return pieces or unknown

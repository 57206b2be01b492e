"""Whether a data folder keeps what its configuration promises, with bounds that are derived, not guessed.

What is dealt or decided row by row (labels, lengths, numbers of masks, ids) admits no exception. What is drawn
(80/10/10, where the masks lie) may stray as far as chance does: a sound folder fails such a check less than once in a
million times.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bert_pretrain.config import DataConfig
from bert_pretrain.make_data import summary
from bert_pretrain.tools.survey import NUM_SLICES, Survey

NO_TOLERANCE = "none"
CHANCE = 1e-6  # of a sound folder to fail one bound

# Of BERT's recipe, not of the configuration (Devlin et al., 2018, section 3.1, task 1).
SHOWN_AS_MASK, SHOWN_AS_RANDOM = 0.8, 0.1

RULES = {
    "columns": "those of masking: {masking} and next_sentence: {next_sentence}",
    "length": "at most {max_seq_length} tokens, and none without text",
    "segments": "segment_b_start leaves text on both sides, or is the length where there is no B",
    "label": "0 or 1",
    "token ids": "every id is in the vocabulary",
    "special tokens": "[CLS] at the beginning, [SEP] after each segment, no special or unused token elsewhere",
    "word starts": "each segment begins with a word, and no piece in the middle of a word begins one",
    "masked positions": "ascending, never on [CLS] or [SEP] or behind the end",
    "masked tokens": "every original is a word piece or [UNK], never [PAD] or another special token",
    "random replacements": "every one is a real word piece, neither special nor unused",
    "predictions": "{masked_lm_prob:.0%} of the text of each example, rounded, at least 1, at most {most}",
    "whole words": "all pieces of a word are predicted, or none",
    "words that fit": "no word is left out that the number of predictions had room for",
}


@dataclass(frozen=True)
class Check:
    """One promise, and how the data keeps it."""

    split: str
    name: str
    measured: str
    expected: str
    tolerance: str
    is_kept: bool


def check_split(split: str, survey: Survey, config: DataConfig, most: int, num_pieces: int) -> list[Check]:
    """Hold what was counted in a split's shards against the configuration.

    Args:
        split: its name.
        survey: of all or some of its shards.
        config: the section `data` it was made with.
        most: predictions in an example at most.
        num_pieces: the word pieces that a random replacement is drawn from.
    """
    whole = survey.shards - len(survey.damaged)
    checks = [
        Check(
            split,
            "SHA-256",
            f"{whole} of {survey.shards} shards fit" + "".join(f"; {what}" for what in survey.damaged.values()),
            "the bytes that the manifest names",
            NO_TOLERANCE,
            not survey.damaged,
        )
    ]
    checks += [
        _rule_check(split, name, rule, survey, config, most) for name, rule in RULES.items() if name in survey.faults
    ]
    sums = survey.sums
    if "label" in survey.faults:
        checks.append(_label_check(split, survey, sums["label_0"], sums["examples"], config))
    if "predictions" in survey.faults:
        checks.append(_masked_check(split, survey, config))
        checks += _shown_checks(split, sums, num_pieces)
        if not config.whole_word_mask:  # short words are taken more easily, wherever these stand
            checks.append(_spread_check(split, survey))
    return checks


def check_manifest(split: str, survey: Survey, recorded: dict[str, Any], config: DataConfig) -> Check:
    """Compare the manifest's figures of a split, all of whose shards were read, with those counted again."""
    measured = summary.join_split(survey.results, config)
    pairs = {name: (recorded.get(name), measured[name]) for name in ("rows", "tokens")}
    said = recorded.get("statistics", {})
    pairs.update({name: (said.get(name), value) for name, value in measured["statistics"].items() if name != "drops"})
    different = [_difference(name, old, new) for name, (old, new) in pairs.items() if not _is_equal(old, new)]
    return Check(
        split,
        "manifest",
        "; ".join(different) or f"{len(pairs)} figures agree",
        "the manifest's figures are those of the shards",
        NO_TOLERANCE,
        not different,
    )


def binomial_range(trials: int, share: float) -> tuple[int, int]:
    """Return the fewest and the most successes that `trials` draws at `share` plausibly have.

    By the Chernoff bound, which holds for any number of trials, for draws without replacement, and where `share` is the
    mean of unequal ones (Hoeffding, 1963): P(X beyond k) <= exp(-trials * KL(k / trials, share)). Either side gets half
    of `CHANCE`.
    """
    limit = math.log(2 / CHANCE)
    middle = trials * share
    low, high = (
        _furthest(round_to(middle), end, lambda k: trials * _divergence(k / trials, share) <= limit)
        for round_to, end in ((math.floor, 0), (math.ceil, trials))
    )
    return low, high


def _furthest(start: int, end: int, is_plausible: Callable[[int], bool]) -> int:
    """Return the last integer on the way from `start` to `end` for which a condition, true at first, still holds."""
    step = 1 if end >= start else -1
    inside, outside = 0, abs(end - start) + 1
    while outside - inside > 1:
        middle = (inside + outside) // 2
        if is_plausible(start + step * middle):
            inside = middle
        else:
            outside = middle
    return start + step * inside


def _divergence(share: float, other: float) -> float:
    """Return the Kullback-Leibler divergence of two coins, in nats."""
    terms = ((share, other), (1 - share, 1 - other))
    return sum(p * math.log(p / q) if q > 0 else math.inf for p, q in terms if p > 0)


def _rule_check(split: str, name: str, rule: str, survey: Survey, config: DataConfig, most: int) -> Check:
    fault = survey.faults[name]
    expected = rule.format(**config.model_dump(), most=most)
    measured = "no example breaks it"
    if fault.examples:
        breaks = "1 example breaks" if fault.examples == 1 else f"{fault.examples:,} examples break"
        measured = f"{breaks} it, the first is row {fault.first_row}"
    elif name == "length":
        measured = f"{survey.longest} at most"
    return Check(split, name, measured, expected, NO_TOLERANCE, fault.examples == 0)


def _label_check(split: str, survey: Survey, is_next: int, examples: int, config: DataConfig) -> Check:
    share = is_next / examples if examples else 0.0
    return Check(
        split,
        "in order" if config.next_sentence == "sop" else "is-next",
        f"{share:.2%}, at most {survey.label_imbalance} more of one label in a shard",
        "50 %, dealt in every shard",
        "1 example in a shard",
        survey.label_imbalance <= 1,
    )


def _masked_check(split: str, survey: Survey, config: DataConfig) -> Check:
    maskable = max(1, int(survey.text_slices.sum()))
    masked, promised = survey.made_predictions, survey.promised_predictions
    return Check(
        split,
        "masked",
        f"{masked / maskable:.3%}",
        f"{promised / maskable:.3%}: {config.masked_lm_prob:.0%}, rounded in each example"
        + (", or less where no further word fits" if config.whole_word_mask else ""),
        NO_TOLERANCE,
        0 < masked <= promised if config.whole_word_mask else masked == promised,
    )


def _shown_checks(split: str, sums: Counter[str], num_pieces: int) -> list[Check]:
    # A replacement drawn at random may be the very token that it replaces; nobody can tell it from a kept one.
    same = SHOWN_AS_RANDOM / max(1, num_pieces)
    shares = {
        "mask": SHOWN_AS_MASK,
        "random": SHOWN_AS_RANDOM - same,
        "original": 1 - SHOWN_AS_MASK - SHOWN_AS_RANDOM + same,
    }
    masked = sums["masked_tokens"]
    return [
        _drawn_check(split, f"shown as {kind}", sums[f"shown_as_{kind}"], masked, share)
        for kind, share in shares.items()
    ]


def _drawn_check(split: str, name: str, successes: int, trials: int, share: float) -> Check:
    low, high = binomial_range(trials, share) if trials else (0, 0)
    return Check(
        split,
        name,
        f"{successes / max(1, trials):.2%} of {trials:,}",
        f"{share:.2%}",
        f"{low / max(1, trials):.2%} to {high / max(1, trials):.2%}",
        low <= successes <= high,
    )


def _spread_check(split: str, survey: Survey) -> Check:
    trials = int(survey.slices.sum())
    checked = []
    for number, (found, expected) in enumerate(zip(survey.slices, survey.expected_slices, strict=True)):
        low, high = binomial_range(trials, float(expected) / trials) if trials else (0, 0)
        # How far from the middle of what is plausible, 1 at its end.
        excess = abs(found - (low + high) / 2) / max(1.0, (high - low) / 2)
        checked.append((excess, number, int(found), low, high))
    _, number, found, low, high = max(checked)
    percent = 100 // NUM_SLICES
    return Check(
        split,
        "spread of masks",
        f"{found / max(1, trials):.2%} between {percent * number} and {percent * (number + 1)} % of the text, "
        "the tenth that strays most",
        f"{float(survey.expected_slices[number]) / max(1, trials):.2%}",
        f"{low / max(1, trials):.2%} to {high / max(1, trials):.2%}",
        all(low <= found <= high for _, _, found, low, high in checked),
    )


def _difference(name: str, old: Any, new: Any) -> str:
    if isinstance(new, dict):
        return f"{name} is another"
    return f"{name} {old:.6g} there, {new:.6g} here" if isinstance(old, float) else f"{name} {old} there, {new} here"


def _is_equal(old: Any, new: Any) -> bool:
    if isinstance(new, float) and isinstance(old, (int, float)):
        return math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(new, dict) and isinstance(old, dict):
        return old.keys() == new.keys() and all(_is_equal(old[key], value) for key, value in new.items())
    if isinstance(new, Sequence) and not isinstance(new, str) and isinstance(old, Sequence):
        return len(old) == len(new) and all(_is_equal(*values) for values in zip(old, new, strict=True))
    return bool(old == new)

"""Checks of a data folder against its configuration, with bounds that are derived, not guessed.

What is decided row by row (labels, lengths, numbers of masks, ids) admits no exception. What is drawn at random
(80/10/10, the positions of masks) may deviate as far as chance allows: a sound folder fails such a check less than once
in a million times.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bert_pretrain.inspect.rules import RULES, Spec
from bert_pretrain.inspect.scan import NUM_SLICES, MaskCounts, Scan

NO_TOLERANCE = "none"
CHANCE = 1e-6  # of a sound folder to fail one bound

# Of BERT's recipe, not of the configuration (Devlin et al., 2018, section 3.1, task 1).
SHOWN_AS_MASK, SHOWN_AS_RANDOM = 0.8, 0.1


@dataclass(frozen=True)
class Check:
    """One check, with its outcome."""

    split: str
    name: str
    measured: str
    expected: str
    tolerance: str
    passed: bool


def check_split(split: str, scan: Scan, spec: Spec) -> list[Check]:
    """Return the checks of a split, all or some of whose shards were scanned."""
    intact = f"{scan.shards - len(scan.damaged)} of {scan.shards} shards are intact"
    damages = "".join(f"; {what}" for what in scan.damaged.values())
    checks = [
        Check(
            split,
            "SHA-256",
            intact + damages,
            "the bytes that the manifest names, and examples in them",
            NO_TOLERANCE,
            not scan.damaged,
        )
    ]
    checks += [_rule_check(split, name, scan, spec) for name in RULES if name in scan.violations]
    if "label" in scan.violations:
        checks.append(_label_check(split, scan, spec))
    if scan.masks is not None:
        checks.append(_masked_check(split, scan.masks, spec))
        checks += _replacement_checks(split, scan, spec)
        if not spec.config.whole_word_mask:  # short words fit more often, wherever they are
            checks.append(_spread_check(split, scan.masks))
    return checks


def check_manifest(split: str, scan: Scan, recorded: dict[str, Any]) -> Check:
    """Compare the manifest's figures of a split, all of whose shards were read, with those counted again."""
    pairs = {name: (recorded.get(name), scan.entry[name]) for name in ("rows", "tokens")}
    statistics = recorded.get("statistics", {})
    pairs |= {
        name: (statistics[name], value)
        for name, value in scan.entry["statistics"].items()
        if name in statistics and name != "drops"  # a folder of an older version has fewer
    }
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
    mean of unequal ones (Hoeffding, 1963): P(X beyond k) <= exp(-trials * KL(k / trials, share)). Each side gets half
    of `CHANCE`.
    """
    limit = math.log(2 / CHANCE)
    mean = trials * share
    low, high = (
        _furthest(round_to(mean), end, lambda k: trials * _divergence(k / trials, share) <= limit)
        for round_to, end in ((math.floor, 0), (math.ceil, trials))
    )
    return low, high


def _furthest(start: int, end: int, is_plausible: Callable[[int], bool]) -> int:
    """Return the last integer from `start` towards `end` for which a condition, true at first, still holds."""
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


def _rule_check(split: str, name: str, scan: Scan, spec: Spec) -> Check:
    examples, first_row = scan.violations[name]
    expected = RULES[name].format(**spec.config.model_dump(), max_predictions=spec.masking.max_predictions)
    measured = f"{scan.longest} at most" if name == "length" else "no example breaks it"
    if examples:
        breaks = "1 example breaks" if examples == 1 else f"{examples:,} examples break"
        measured = f"{breaks} it, the first is row {first_row}"
    return Check(split, name, measured, expected, NO_TOLERANCE, examples == 0)


def _label_check(split: str, scan: Scan, spec: Spec) -> Check:
    share = scan.sums["label_0"] / max(1, scan.sums["examples"])
    return Check(
        split,
        "in order" if spec.config.next_sentence == "sop" else "is-next",
        f"{share:.2%}, at most {scan.label_imbalance} more of one label in a shard",
        "50 % in every shard",
        "1 example in a shard",
        scan.label_imbalance <= 1,
    )


def _masked_check(split: str, masks: MaskCounts, spec: Spec) -> Check:
    maskable = max(1, int(masks.text_slices.sum()))
    is_whole = spec.config.whole_word_mask
    return Check(
        split,
        "masked",
        f"{masks.made / maskable:.3%}",
        f"{masks.expected / maskable:.3%}: {spec.config.masked_lm_prob:.0%}, rounded in each example"
        + (", or less where no further word fits" if is_whole else ""),
        NO_TOLERANCE,
        0 < masks.made <= masks.expected if is_whole else masks.made == masks.expected,
    )


def _replacement_checks(split: str, scan: Scan, spec: Spec) -> list[Check]:
    """Check 80/10/10: what is shown in place of the masked tokens."""
    # A random replacement may be the very token that it replaces; it cannot be told from a kept one.
    same = SHOWN_AS_RANDOM / max(1, len(spec.masking.replacement_ids))
    shares = {
        "mask": SHOWN_AS_MASK,
        "random": SHOWN_AS_RANDOM - same,
        "original": 1 - SHOWN_AS_MASK - SHOWN_AS_RANDOM + same,
    }
    sums, checks = scan.sums, []
    trials = sums["masked_tokens"]
    for kind, share in shares.items():
        found = sums[f"shown_as_{kind}"]
        low, high = binomial_range(trials, share) if trials else (0, 0)
        measured = f"{found / max(1, trials):.2%} of {trials:,}"
        tolerance = _range(low, high, trials)
        checks.append(Check(split, f"shown as {kind}", measured, f"{share:.2%}", tolerance, low <= found <= high))
    return checks


def _spread_check(split: str, masks: MaskCounts) -> Check:
    """Check that masks are spread evenly over the text; names the tenth that deviates most."""
    trials = int(masks.slices.sum())
    checked = []
    for number, (found, expected) in enumerate(zip(masks.slices, masks.expected_slices, strict=True)):
        low, high = binomial_range(trials, float(expected) / trials) if trials else (0, 0)
        # The distance from the middle of the plausible range, 1 at its ends.
        distance = abs(found - (low + high) / 2) / max(1.0, (high - low) / 2)
        checked.append((distance, number, int(found), low, high))
    _, number, found, low, high = max(checked)
    percent = 100 // NUM_SLICES
    return Check(
        split,
        "spread of masks",
        f"{found / max(1, trials):.2%} between {percent * number} and {percent * (number + 1)} % of the text, "
        "the tenth that deviates most",
        f"{float(masks.expected_slices[number]) / max(1, trials):.2%}",
        _range(low, high, trials),
        all(low <= found <= high for _, _, found, low, high in checked),
    )


def _range(low: int, high: int, trials: int) -> str:
    return f"{low / max(1, trials):.2%} to {high / max(1, trials):.2%}"


def _difference(name: str, old: Any, new: Any) -> str:
    if isinstance(new, dict):
        return f"{name} differs"
    form = ".6g" if isinstance(old, float) else ""
    return f"{name} is {old:{form}} in the manifest, {new:{form}} in the shards"


def _is_equal(old: Any, new: Any) -> bool:
    if isinstance(new, float) and isinstance(old, (int, float)):
        return math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(new, dict) and isinstance(old, dict):
        return old.keys() == new.keys() and all(_is_equal(old[key], value) for key, value in new.items())
    if isinstance(new, Sequence) and not isinstance(new, str) and isinstance(old, Sequence):
        return len(old) == len(new) and all(_is_equal(*values) for values in zip(old, new, strict=True))
    return bool(old == new)

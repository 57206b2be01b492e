"""Detection of text with one sentence per line, in any script, and of the delimiter of CSV."""

import math
import re

from tokenizers import Regex, normalizers

from bert_pretrain.text.sentences import LOOK_ALIKES, segment

_MARKS = rf"(?:\p{{STerm}}|\u1361\u1361|{LOOK_ALIKES})"  # the Unicode property Sentence_Terminal; see `sentences.py`
_SENTENCE_MARKS = normalizers.Replace(Regex(_MARKS), "\0")
_SENTENCE_ENDS = normalizers.Replace(Regex(rf"(?:{_MARKS}|[…;；:：\"'\p{{Pe}}\p{{Pf}}])$"), "\0")
_MIN_MARKS = 1 / 500  # share of the characters; a language with a smaller share is written without sentence marks
# Evidence beyond these is clear. Paragraphs that are read as sentences lose sentence ends, so they need less evidence.
CLEARLY_PARAGRAPHS, CLEARLY_LINES = -0.6, 2.0


def evidence_of_lines(sample: str, language: str) -> float:
    """Return the evidence that a sample has one sentence per line (at least 0) or paragraphs (negative).

    The sample has one sentence per line if most lines end with a sentence mark and few lines have several sentences. In
    a language without sentence marks, such as Thai, blank lines must separate blocks of several lines, and lines must
    not be wrapped at a fixed width. Evidence grows with the square root of the number of lines.
    """
    lines = [line.strip() for line in sample.split("\n")[:-1] or [sample]]
    num_blocks = sum(not line for line in lines) + 1
    lines = [line for line in lines if line][:2000]
    num_lines = max(1, len(lines))
    num_ends = _count(_SENTENCE_ENDS, "\n".join(lines))
    if num_ends >= 0.5 * num_lines:
        tested = lines[:500]
        margin = 0.35 - sum(len(segment(language, line[:2000])) > 1 for line in tested) / len(tested)
    elif _count(_SENTENCE_MARKS, "\n".join(lines)) >= _MIN_MARKS * sum(map(len, lines)):
        margin = num_ends / num_lines - 0.5
    elif num_blocks == 1:
        margin = -0.1 / num_lines
    else:
        max_width = max(map(len, lines))
        num_wide = sum(len(line) > 0.75 * max_width for line in lines)
        # One long line changes `num_wide` much, so it counts less.
        margin = min(1 / 1.5 - num_blocks / num_lines, (0.5 - num_wide / num_lines) / 4)
    evidence = margin * math.sqrt(num_lines)
    return evidence if num_lines >= 3 else min(evidence, -0.1)


def _count(pattern: normalizers.Replace, text: str) -> int:
    """Count the matches of a regular expression. It may have Unicode properties, which `re` does not support."""
    replaced: str = pattern.normalize_str(text)
    return replaced.count("\0") - text.count("\0")


def delimiter_of(sample: str) -> str:
    """Return the CSV delimiter that is most frequent in the header outside quotes."""
    header = re.sub(r'"[^"]*("|$)', "", sample.lstrip("\r\n").partition("\n")[0])
    return max(",;\t", key=header.count)

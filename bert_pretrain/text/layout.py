"""Detection of text with one sentence per line, in any script, and of the delimiter of CSV."""

import re

from tokenizers import Regex, normalizers

from bert_pretrain.text.sentences import segment

_SENTENCE_MARKS = r"(?:\p{STerm}|\u1361\u1361)"  # the Unicode property Sentence_Terminal; Ethiopic, see `sentences.py`
_SENTENCE_ENDS = rf"(?:{_SENTENCE_MARKS}|[…;；:：\"'\p{{Pe}}\p{{Pf}}])$"
_MIN_MARKS = 1 / 500  # share of the characters; a language with a smaller share is written without sentence marks


def has_one_sentence_per_line(sample: str, language: str) -> bool:
    """Return whether a sample has one sentence per line, rather than paragraphs.

    This is the case if most lines end with a sentence mark and few lines have several sentences. In a language without
    sentence marks, such as Thai, blank lines must separate blocks of several lines, and lines must not be wrapped at a
    fixed width.
    """
    lines = [line.strip() for line in sample.split("\n")[:-1] or [sample]]
    num_blocks = sum(not line for line in lines) + 1
    lines = [line for line in lines if line][:2000]
    if len(lines) < 3:
        return False
    if _count(_SENTENCE_ENDS, "\n".join(lines)) < 0.5 * len(lines):
        num_marks = _count(_SENTENCE_MARKS, "\n".join(lines))
        max_width = max(map(len, lines))
        is_wrapped = sum(len(line) > 0.75 * max_width for line in lines) > 0.5 * len(lines)
        return num_marks < _MIN_MARKS * sum(map(len, lines)) and 1 < num_blocks <= len(lines) / 1.5 and not is_wrapped
    num_with_several = sum(len(segment(language, line[:2000])) > 1 for line in lines[:500])
    return num_with_several <= 0.35 * len(lines[:500])


def _count(pattern: str, text: str) -> int:
    """Count the matches of a regular expression. It may have Unicode properties, which `re` does not support."""
    replaced: str = normalizers.Replace(Regex(pattern), "\0").normalize_str(text)
    return replaced.count("\0") - text.count("\0")


def delimiter_of(sample: str) -> str:
    """Return the CSV delimiter that is most frequent in the header outside quotes."""
    header = re.sub(r'"[^"]*("|$)', "", sample.lstrip("\r\n").partition("\n")[0])
    return max(",;\t", key=header.count)

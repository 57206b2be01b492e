"""What the beginning of a text tells about its layout: sentences per line, the delimiter of CSV."""

import re

DELIMITERS = (",", ";", "\t")
_QUOTED = re.compile(r'"[^"]*("|$)')


def has_one_sentence_a_line(sample: str, language: str) -> bool:
    """Whether a sample has one sentence per line, rather than running paragraphs, hard-wrapped or not.

    It has if most lines end as sentences do, and few contain more than one.
    """
    import sentencex

    lines = [line.strip() for line in sample.split("\n")[:-1] or [sample]]
    lines = [line for line in lines if line][:2000]
    if len(lines) < 3:
        return False
    ended = sum(line[-1] in ".!?。！？…;；:：\"'”’」』）)]》" for line in lines)
    several = sum(len(sentencex.segment(language, line[:2000])) > 1 for line in lines[:500])
    return ended >= 0.5 * len(lines) and several <= 0.35 * len(lines[:500])


def delimiter_of(sample: str) -> str:
    """Return what separates the columns of CSV: the most frequent delimiter of the header, outside quotes."""
    header = _QUOTED.sub("", sample.lstrip("\r\n").partition("\n")[0])
    return max(DELIMITERS, key=header.count)

"""Sentence splitting: by lines, or by the rules of `sentencex` for the language.

The time of `sentencex` is quadratic in the length of a paragraph, and all text after an unmatched quotation mark is one
sentence. So text is split in small windows. The last sentence of a window is moved to the next window.
"""

import itertools
import re

import sentencex

# Characters typed for a danda: a Bengali numerator, or a vertical bar after an Indic letter; colons for Ethiopic marks.
LOOK_ALIKES = r"\u09f7|[\u0900-\u0dff] ?\||[\u1200-\u137f] ?::"
# Sentence ends for which `sentencex` has no rules: in Khmer, in Tibetan script, two word spaces in Ethiopic script, and
# `LOOK_ALIKES`.
_ENDS = re.compile(
    r"(?<=[\u17d4\u17d5\u09f7])\s*|(?<=[\u0f0d\u0f0e])\s+|(?<=\u1361\u1361)\s*"
    r"|(?:(?<=[\u0900-\u0dff]\|)|(?<=[\u0900-\u0dff] \|)|(?<=[\u1200-\u137f]::)|(?<=[\u1200-\u137f] ::))\s+"
)
_END_MARKS = (*"\u17d4\u17d5\u0f0d\u0f0e\u1361\u09f7|", "::")
_BLANK_LINES = re.compile(r"\n[ \t\r\u00a0\u3000]+(?=\n)")  # `sentencex` ends a paragraph only at an empty line
WINDOW_CHARACTERS = 1 << 12
# `sentencex` 1.0.32 panics at a capital letter followed by a non-ASCII blank and a dot.
_WIDE_BLANKS = "".join(map(chr, (0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)))
_BLANK_BEFORE_DOT = re.compile(rf"[{_WIDE_BLANKS}](?=\s*\.)")


def segment(language: str, text: str) -> list[str]:
    """Split a text into sentences. They include the white space around them."""
    has_blanks = not text.isascii() and any(map(text.__contains__, _WIDE_BLANKS))  # much faster than the expression
    replaced, num_blanks = _BLANK_BEFORE_DOT.subn(" ", text) if has_blanks else (text, 0)
    sentences: list[str] = sentencex.segment(language, replaced)
    if num_blanks:
        bounds = itertools.accumulate(map(len, sentences), initial=0)
        sentences = [text[begin:end] for begin, end in itertools.pairwise(bounds)]
    if not text.isascii() and any(map(text.__contains__, _END_MARKS)):
        sentences = [part for sentence in sentences for part in _ENDS.split(sentence) if part]
    return sentences


class SentenceSplitter:
    """Splits documents into sentences. A document may be passed in several blocks of text."""

    def __init__(self, splitter: str, language: str) -> None:
        """`splitter` is `lines` or `sentencex`; the language is only used by `sentencex`."""
        self._by_lines = splitter == "lines"
        self._language = language
        self._unfinished = ""  # the last sentence of the text so far

    def split(self, text: str, *, ends_document: bool = True) -> list[str]:
        """Return the sentences completed by the next block, stripped and without line ends."""
        if self._by_lines:
            return [line for line in map(str.strip, text.split("\n")) if line]
        text = _BLANK_LINES.sub("\n", text)
        sentences: list[str] = []
        for begin in range(0, max(1, len(text)), WINDOW_CHARACTERS):
            pieces = segment(self._language, self._unfinished + text[begin : begin + WINDOW_CHARACTERS])
            self._unfinished = ""
            if pieces and (begin + WINDOW_CHARACTERS < len(text) or not ends_document):
                self._unfinished = pieces.pop()
                if len(self._unfinished) > WINDOW_CHARACTERS:
                    # No sentence ends in the window. Cut it after the last word, so that the time stays linear.
                    cut = max(map(self._unfinished.rfind, " \n\t")) + 1 or len(self._unfinished)
                    pieces.append(self._unfinished[:cut])
                    self._unfinished = self._unfinished[cut:]
            sentences += pieces
        return [sentence.replace("\n", " ") for sentence in map(str.strip, sentences) if sentence]

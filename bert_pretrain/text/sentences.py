"""Documents to sentences: lines, or the rules of `sentencex` for the language.

`sentencex` knows over 200 languages, but its time is quadratic in the length of a paragraph, and an unmatched
quotation mark makes it treat all that follows as one quoted sentence. So long text is fed in small windows, and the
unfinished sentence at a window's end is carried over.
"""

import re

import sentencex

_ENDS = {"km": re.compile(r"(?<=[\u17d4\u17d5])\s*"), "bo": re.compile(r"(?<=[\u0f0d\u0f0e])\s+")}
_ENDS["dz"] = _ENDS["bo"]
"""Ends of sentences in languages that `sentencex` has no rules for."""
WINDOW_CHARACTERS = 1 << 12


def segment(language: str, text: str) -> list[str]:
    """Return the sentences of a text, with the blanks between them."""
    sentences: list[str] = sentencex.segment(language, text)
    if ends := _ENDS.get(language):
        sentences = [part for sentence in sentences for part in ends.split(sentence) if part]
    return sentences


class SentenceSplitter:
    """Splits documents that come in one or several blocks of text, one document after the other."""

    def __init__(self, splitter: str, language: str) -> None:
        """Split by `splitter`, `lines` or `sentencex` (which needs the language)."""
        self._by_lines = splitter == "lines"
        self._language = language
        self._held = ""

    def split(self, text: str, *, ends_document: bool = True) -> list[str]:
        """Return the sentences that the next block completes, stripped; none contains a line end."""
        if self._by_lines:
            return [line for line in map(str.strip, text.split("\n")) if line]
        sentences: list[str] = []
        for begin in range(0, max(1, len(text)), WINDOW_CHARACTERS):
            pieces = segment(self._language, self._held + text[begin : begin + WINDOW_CHARACTERS])
            self._held = ""
            if pieces and (begin + WINDOW_CHARACTERS < len(text) or not ends_document):
                self._held = pieces.pop()
                if len(self._held) > WINDOW_CHARACTERS:
                    # No sentence ends here: cut at the last blank, so that the work stays linear.
                    cut = self._held.rfind(" ") + 1 or len(self._held)
                    pieces.append(self._held[:cut])
                    self._held = self._held[cut:]
            sentences += pieces
        return [sentence.replace("\n", " ") for sentence in map(str.strip, sentences) if sentence]

"""Documents to sentences: lines where a file holds one sentence a line, otherwise the rules of `sentencex`.

`sentencex` knows over 200 languages, but its time is quadratic in the length of a paragraph, and an odd quotation mark
makes it take all that follows for one quoted sentence. So long text is fed in small windows, and the unfinished
sentence at a window's end is carried over.
"""

import sentencex

WINDOW_CHARACTERS = 1 << 12


def split_lines(text: str) -> list[str]:
    """Return the lines of a text that hold anything, stripped."""
    return [line for line in map(str.strip, text.split("\n")) if line]


def split_sentences(text: str, language: str) -> list[str]:
    """Return the sentences of running text, stripped, line ends within them turned to blanks."""
    sentences: list[str] = []
    held = ""
    for begin in range(0, len(text), WINDOW_CHARACTERS):
        window = held + text[begin : begin + WINDOW_CHARACTERS]
        pieces = sentencex.segment(language, window)
        held = ""
        if begin + WINDOW_CHARACTERS < len(text):
            held = pieces.pop()
            if len(held) > WINDOW_CHARACTERS:
                # No sentence ends here: cut at the last blank, so that the work stays linear.
                cut = held.rfind(" ") + 1 or len(held)
                pieces.append(held[:cut])
                held = held[cut:]
        sentences += pieces
    return [sentence.replace("\n", " ") for sentence in map(str.strip, sentences) if sentence]


def split(text: str, splitter: str, language: str) -> list[str]:
    """Return the sentences of a document by `splitter`, `lines` or `sentencex`; none holds a line end."""
    return split_lines(text) if splitter == "lines" else split_sentences(text, language)

"""The language of inputs, and documents to sentences: lines, or the rules of `sentencex` for the language.

`sentencex` knows over 200 languages, but its time is quadratic in the length of a paragraph, and an unmatched
quotation mark makes it treat all that follows as one quoted sentence. So long text is fed in small windows, and the
unfinished sentence at a window's end is carried over.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import sentencex

from bert_pretrain.config import AUTO_LANGUAGE, SINGLE_CHARACTERS, DataConfig
from bert_pretrain.text.readers import read_texts
from bert_pretrain.text.sources import FEW_SOURCES, Source, evenly_spaced, examined, sample_text
from bert_pretrain.text.text_files import ByteRange

WINDOW_CHARACTERS = 1 << 12
CHINESE_FROM = 0.3
"""Share of Chinese characters among the letters, above which the text is Chinese."""
_IDEOGRAPH = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_SAMPLE_CHARACTERS = 1 << 15


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
            pieces = sentencex.segment(self._language, self._held + text[begin : begin + WINDOW_CHARACTERS])
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


def count_letters(text: str) -> tuple[int, int]:
    """Return the number of Chinese characters, in whatever language, and of all letters."""
    return len(_IDEOGRAPH.findall(text)), sum(map(str.isalpha, text))


def with_language(config: DataConfig, sources: Sequence[Source]) -> DataConfig:
    """Return the configuration with the language and the word segmenter that the beginnings of the inputs call for."""
    open_keys = {"language": "zh"} if config.language == AUTO_LANGUAGE else {}
    if config.whole_word_mask and config.word_segmenter is None:
        open_keys["word_segmenter"] = "jieba"
    found: dict[str, str | None] = {"word_segmenter": None} if config.word_segmenter == SINGLE_CHARACTERS else {}
    if open_keys:
        chosen = evenly_spaced(sources, min(len(sources), FEW_SOURCES))
        counts = [count_letters(_beginning(examined(source, config), config)) for source in chosen]
        share = sum(cjk for cjk, _ in counts) / max(1, sum(letters for _, letters in counts))
        if share > CHINESE_FROM:
            values = ", ".join(f"data.{key} is {value}" for key, value in open_keys.items())
            print(f"{share:.0%} of the letters are Chinese characters: {values}")
            found |= open_keys
        elif "language" in open_keys:
            found["language"] = "en"
    return config.model_copy(update=found)


def _beginning(source: Source, config: DataConfig) -> str:
    if source.format == "txt":
        return sample_text(source)
    if source.format == "dataset":
        source = replace(source, format="stream")
    texts: list[str] = []
    lenient = config.model_copy(update={"strict": False})
    for text in read_texts(ByteRange(source), lenient, Counter()):
        texts.append((text or "")[:_SAMPLE_CHARACTERS])
        if sum(map(len, texts)) >= _SAMPLE_CHARACTERS:
            break
    return "".join(texts)

"""The language of inputs, where the configuration leaves it open: Chinese by its characters, or English's rules."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bert_pretrain.config import AUTO_LANGUAGE, SINGLE_CHARACTERS, DataConfig
from bert_pretrain.text.records import read_texts
from bert_pretrain.text.sources import FEW_SOURCES, Source, evenly_spaced, sample_text
from bert_pretrain.text.text_files import ByteRange

CHINESE_FROM = 0.3
"""Share of Chinese characters among the letters, above which the text is Chinese."""
_CJK_BLOCKS = (("\u3400", "\u4dbf"), ("\u4e00", "\u9fff"))
_SAMPLE_CHARACTERS = 1 << 15


def count_letters(text: str) -> tuple[int, int]:
    """Return the number of Chinese characters, in whatever language, and of all letters."""
    codes = np.frombuffer(text.encode("utf-32-le", "replace"), dtype=np.uint32)
    cjk = sum(int(((codes >= ord(first)) & (codes <= ord(last))).sum()) for first, last in _CJK_BLOCKS)
    # Letters of other scripts: beyond ASCII all but punctuation and symbols of the general blocks.
    is_ascii_letter = ((codes | 32) >= ord("a")) & ((codes | 32) <= ord("z"))
    is_other_letter = (codes >= 0xC0) & ((codes < 0x2000) | (codes > 0x303F)) & (codes < 0xFF00)
    return cjk, int((is_ascii_letter | is_other_letter).sum())


def with_language(config: DataConfig, sources: Sequence[Source]) -> DataConfig:
    """Return the configuration with the language and the word segmenter that the beginnings of the inputs call for."""
    if config.language != AUTO_LANGUAGE and not (config.whole_word_mask and config.word_segmenter is None):
        return _single_characters(config)
    chosen = evenly_spaced(sources, min(len(sources), FEW_SOURCES))
    counts = [count_letters(_beginning(source, config)) for source in chosen]
    share = sum(cjk for cjk, _ in counts) / max(1, sum(letters for _, letters in counts))
    found: dict[str, str] = {}
    if config.language == AUTO_LANGUAGE:
        found["language"] = "zh" if share > CHINESE_FROM else "en"
    if config.whole_word_mask and config.word_segmenter is None and share > CHINESE_FROM:
        found["word_segmenter"] = "jieba"
    if share > CHINESE_FROM:
        values = ", ".join(f"data.{key} is {value}" for key, value in found.items())
        print(f"{share:.0%} of the letters are Chinese characters: {values}")
    return _single_characters(config.model_copy(update=found))


def _single_characters(config: DataConfig) -> DataConfig:
    is_single = config.word_segmenter == SINGLE_CHARACTERS
    return config.model_copy(update={"word_segmenter": None}) if is_single else config


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

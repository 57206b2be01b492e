"""The language of inputs, where the configuration leaves it open: Chinese by its characters, or English's rules."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from bert_pretrain.config import AUTO_LANGUAGE, SINGLE_CHARACTERS, DataConfig
from bert_pretrain.text.readers import read_texts
from bert_pretrain.text.sources import FEW_SOURCES, Source, evenly_spaced, sample_text
from bert_pretrain.text.text_files import ByteRange

CHINESE_FROM = 0.3
"""Share of Chinese characters among the letters, above which the text is Chinese."""
_IDEOGRAPH = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_SAMPLE_CHARACTERS = 1 << 15


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
        counts = [count_letters(_beginning(source, config)) for source in chosen]
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

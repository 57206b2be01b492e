"""Check language recognition, layout detection and token ids on a text in many languages.

Reads JSON lines with the fields `language` and `text`. A language is an ISO 639-3 code, optionally with `_` and a
variety. Exit code 1 if more than 5 % of the languages or 1 % of the layouts are not recognized, or if an id differs
from that of `AutoTokenizer`.

    python scripts/check_languages.py declaration.jsonl [--only layouts languages ids]
"""

import contextlib
import io
import sys
import tempfile
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
from iso639 import Lang
from iso639.exceptions import DeprecatedLanguageValue, InvalidLanguageValue
from measure import parser_of, read_rows
from transformers import AutoTokenizer
from transformers.utils import logging

from bert_pretrain.config import VocabConfig
from bert_pretrain.text.fast_tokenizer import Encoder
from bert_pretrain.text.languages import identifier, recognize
from bert_pretrain.text.layout import evidence_of_lines
from bert_pretrain.text.sentences import segment
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.counting import Counts
from bert_pretrain.vocab.normalized import NormalizedWords, normalize
from bert_pretrain.vocab.wordpiece import choose_alphabet, train_wordpiece

SETTINGS: dict[str, dict[str, bool]] = {
    "default": {},
    "lowercase": {"lowercase": True},
    "stripped": {"lowercase": True, "strip_accents": True},
    "cased": {"lowercase": False},
}
# Serbo-Croatian; Greek in polytonic spelling; Norwegian Bokmål
ONE_LANGUAGE = [{"sr", "hr", "bs"}, {"el", "grc"}, {"no", "nb"}]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("texts", type=Path)
    checks = {"languages": check_languages, "layouts": check_layouts, "ids": check_ids}
    parser.add_argument("--only", nargs="+", choices=list(checks), default=list(checks))
    arguments = parser.parse_args()
    texts = {row["language"]: row["text"] for row in read_rows(arguments.texts)}
    failed = [name for name in arguments.only if not checks[name](texts)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def code_of(name: str) -> str:
    """Return the ISO 639-1 code of a language or of the macrolanguage it belongs to, else its ISO 639-3 code."""
    base = name.partition("_")[0]
    try:
        language = Lang(base)
    except (DeprecatedLanguageValue, InvalidLanguageValue):
        return base
    whole = language.macro()
    return language.pt1 or (whole and whole.pt1) or base


def check_languages(texts: dict[str, str]) -> bool:
    known = set(identifier().labels)
    checked = {name: text for name, text in texts.items() if code_of(name) in known}
    wrong = {}
    for name, text in checked.items():
        recognized, expected = recognize([text])[0].code, code_of(name)
        if recognized != expected and not any({recognized, expected} <= group for group in ONE_LANGUAGE):
            wrong[name] = recognized
    print(f"languages: {len(checked) - len(wrong)} of {len(checked)} that the library knows; wrong: {wrong}")
    return len(wrong) <= 0.05 * len(checked)


def layouts_of(text: str, language: str) -> dict[str, str]:
    """Return a text in three layouts: one sentence per line, one paragraph per line, and wrapped at 80 columns."""
    paragraphs = [" ".join(block.split()) for block in text.split("\n") if block.strip()]
    sentences = [sentence.strip() for block in paragraphs for sentence in segment(language, block)]
    sentences = [sentence for sentence in sentences if sentence]
    documents = ["\n".join(sentences[first : first + 5]) for first in range(0, len(sentences), 5)]
    running = [" ".join(paragraphs[first : first + 6]) for first in range(0, len(paragraphs), 6)]
    wrapped = "\n\n".join("\n".join(textwrap.wrap(paragraph, 80)) for paragraph in running)
    return {"sentences": "\n\n".join(documents) + "\n", "paragraphs": "\n\n".join(running) + "\n", "wrapped": wrapped}


def check_layouts(texts: dict[str, str]) -> bool:
    wrong = []
    for name, text in texts.items():
        for layout, sample in layouts_of(text, code_of(name)).items():
            if (evidence_of_lines(sample, code_of(name)) >= 0) is not (layout == "sentences"):
                wrong.append((layout, name))
    num_texts = 3 * len(texts)
    print(f"layouts: {num_texts - len(wrong)} of {num_texts}; wrong: {wrong}")
    return len(wrong) <= 0.01 * num_texts


def check_ids(texts: dict[str, str]) -> bool:
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    different, accents, unknown = [], Counter[str](), {}
    for name, text in texts.items():
        data = np.frombuffer(text.encode(), dtype=np.uint8)
        counts = Counts()
        counts.add_text(bytearray(data), VocabConfig(), is_held_out=False)
        for setting, chosen in SETTINGS.items():
            with contextlib.redirect_stdout(io.StringIO()):
                words = normalize(counts, VocabConfig.model_validate({"size": 4000, **chosen}), code_of(name), None)
            tokenizer = tokenizer_of(words)
            ids = Encoder(tokenizer).encode(data, np.zeros(1, dtype=np.int64)).ids
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save(Path(folder))
                reference = AutoTokenizer.from_pretrained(folder)
            if reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] != ids.tolist():
                different.append((name, setting))
            if setting == "default":
                accents["stripped" if words.metrics["strip_accents"] else "kept"] += 1
                sizes = {word: len(word) * count for word, count in words.training.items()}
                lost = sum(size for word, size in sizes.items() if tokenizer.encode_text(word) == [tokenizer.unk_id])
                unknown[name] = lost / sum(sizes.values())
    worst = sorted(unknown.items(), key=lambda item: -item[1])[:5]
    print(f"accents by default: {dict(accents)}; most characters in [UNK]: {[(name, f'{v:.2%}') for name, v in worst]}")
    print(f"ids: all of {len(SETTINGS) * len(texts)} equal but {different}")
    return not different


def tokenizer_of(words: NormalizedWords) -> Tokenizer:
    alphabet = choose_alphabet(words.training, None, 3800)
    return Tokenizer(train_wordpiece(words.training, alphabet, VocabConfig(size=4000))[0], **asdict(words.rules))


if __name__ == "__main__":
    main()

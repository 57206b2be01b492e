"""Detection of the language and the layout of a text."""

from pathlib import Path

import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError
from bert_pretrain.text.corpus import Corpus
from bert_pretrain.text.languages import recognize
from bert_pretrain.text.layout import evidence_of_lines

TEXTS = {
    "de": "Am Morgen ging der alte Müller mit seinem Hund durch den Wald und sprach über das Wetter.",
    "fr": "Le matin, le vieux meunier traversait la forêt avec son chien et parlait longuement du temps.",
    "hu": "Reggel az öreg molnár a kutyájával átment az erdőn, és hosszan beszélt az időjárásról meg a termésről.",
    "hi": "सुबह बूढ़ा चक्कीवाला अपने कुत्ते के साथ जंगल से होकर गया और देर तक मौसम और फसल के बारे में बात करता रहा।",
    "vi": "Buổi sáng ông thợ xay già cùng con chó đi qua rừng và nói rất lâu về thời tiết và mùa màng năm nay.",
    "th": "ตอนเช้าคนโม่แป้งชราเดินผ่านป่ากับสุนัขของเขาและพูดคุยเรื่องอากาศและการเก็บเกี่ยวเป็นเวลานาน",
    "ja": "朝、年老いた粉屋は犬を連れて森を通り抜け、天気や収穫について長いあいだ話していました。",
    "zh": "早上，老磨坊主带着他的狗穿过森林，长时间地谈论天气和收成，然后慢慢地走回家去。",
    "en": "In the morning the old miller walked through the forest with his dog and talked about the weather.",
    "am": "ጠዋት ላይ አዛውንቱ ወፍጮ ጠባቂ ከውሻው ጋር በጫካው ውስጥ አለፈ ስለ አየር ሁኔታና ስለ ምርት ለረጅም ጊዜ ተናገረ።",
    "hy": "Առավոտյան ծեր ջրաղացպանը իր շան հետ անցավ անտառով և երկար խոսեց եղանակի ու բերքի մասին։",
}


def language_of(text: str, folder: Path, *settings: str) -> str:
    (folder / "a.txt").write_text(text + "\n", encoding="utf-8")
    data = load_config(settings=settings).data
    return Corpus.open([str(folder / "a.txt")], data).config.language


@pytest.mark.parametrize("language", list(TEXTS))
def test_language_is_detected_and_printed(language: str, tmp_path: Path, capsys) -> None:
    assert language_of(f"{TEXTS[language]}\n" * 5, tmp_path) == language
    assert f"data.language is {language}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "language"),
    [("deu", "de"), ("en-US", "en"), ("KHM", "km"), ("cmn", "cmn"), ("yue", "yue"), ("mul", "mul")],
)
def test_a_given_code_becomes_the_short_one(code: str, language: str, tmp_path: Path) -> None:
    assert language_of(TEXTS["de"], tmp_path, f"data.language={code}") == language


def test_languages_of_a_mix_are_ranked_by_share() -> None:
    samples = [TEXTS["de"] * 20] * 3 + [TEXTS["fr"] * 20]
    found = recognize(samples)
    assert [one.code for one in found] == ["de", "fr"]
    assert found[0].share == pytest.approx(0.75, abs=0.03)
    assert str(found[0]) == f"German {found[0].share:.0%}"


def test_small_files_do_not_decide_the_language(tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_text(f"{TEXTS['de']}\n" * 3000)
    for name in ("LICENSE.txt", "NOTICE.txt", "README.txt"):
        (tmp_path / name).write_text(f"{TEXTS['en']}\n" * 100)
    assert Corpus.open([str(tmp_path)], load_config().data).config.language == "de"


def test_mix_without_a_main_language_is_refused(tmp_path: Path) -> None:
    text = "\n".join(f"{TEXTS[language]} " * 60 for language in ("de", "fr", "hu"))
    with pytest.raises(ConfigError) as caught:
        language_of(text, tmp_path)
    assert caught.value.where == "data.language"


@pytest.mark.parametrize("text", ["1234 5678 " * 50, "x = f(y); return z[0] + 1\n" * 3])
def test_text_without_words_is_english_with_a_hint(text: str, tmp_path: Path, capsys) -> None:
    assert language_of(text, tmp_path) == "en"
    assert "--set data.language=CODE" in capsys.readouterr().out


def test_unknown_language_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="xx"):
        language_of(TEXTS["en"], tmp_path, "data.language=xx")


@pytest.mark.parametrize("mark", ["\u0964", "\u09f7", "|", " |"])
def test_characters_typed_for_a_danda_end_a_line(mark: str) -> None:
    assert evidence_of_lines(f"আজ আকাশ ভালো{mark}\n" * 20, "bn") >= 0


@pytest.mark.parametrize("language", list(TEXTS))
def test_layouts_are_detected_in_any_script(language: str) -> None:
    sentence = TEXTS[language]
    words = sentence.split()
    sentences = [
        " ".join(words[number % 3 :]) if len(words) > 9 else sentence[17 * (number % 5) :] for number in range(24)
    ]
    blocks = ["\n".join(sentences[first : first + 4]) for first in range(0, 24, 4)]
    assert evidence_of_lines("\n\n".join(blocks) + "\n", language) >= 0
    wrapped = [block[first : first + 40] for block in blocks for first in range(0, len(block), 40)]
    assert evidence_of_lines("\n".join(line.replace("\n", " ") for line in wrapped) + "\n", language) < 0

"""`vocab` in languages other than English."""

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bert_pretrain.config_file import load_config
from bert_pretrain.io.manifest import read_manifest
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text.normalization import accent_loss, is_unspaced, mostly_without_blanks, words_pattern
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.run import make_vocab

HINDI = "सदस्य देशों के सभी लोग मिलकर काम करते हैं और मैं उनके साथ हूँ।"
VIETNAMESE = "Má tôi nói rằng con ma và cái mả không phải là mạ non."
THAI = "วันนี้อากาศดีมากและเราจะไปเดินเล่นที่สวนสาธารณะใกล้บ้านของเรา"
KHMER = "ថ្ងៃនេះអាកាសធាតុល្អណាស់ហើយយើងនឹងទៅដើរលេងនៅសួនច្បារ"
BURMESE = "ယနေ့ရာသီဥတုကောင်းသောကြောင့်ကျွန်ုပ်တို့ပန်းခြံသို့လမ်းလျှောက်သွားမည်။"
LAO = "ມື້ນີ້ອາກາດດີຫຼາຍແລະພວກເຮົາຈະໄປຍ່າງຫຼິ້ນຢູ່ສວນສາທາລະນະໃກ້ບ້ານ"
KOREAN = "모든 사람은 좋은 날씨에 공원을 걷는다."
ENGLISH = "The naïve guest went to the old café by the river and said nothing at all to anyone there, " * 5
TEXTS = {"hi": HINDI, "vi": VIETNAMESE, "th": THAI, "km": KHMER, "my": BURMESE, "lo": LAO, "ko": KOREAN, "en": ENGLISH}


def make(text: str, language: str, folder: Path, *settings: str) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text(f"{text}\n" * 50, encoding="utf-8")
    config = load_config(settings=(f"data.language={language}", "vocab.size=1000", *settings))
    return Tokenizer.load(make_vocab(config, [str(folder / "a.txt")], folder / "vocab", workers=1))


@pytest.mark.parametrize("language", ["hi", "vi", "ko", "th"])
def test_accents_are_kept_if_stripping_changes_many_words(language: str, tmp_path: Path, capsys) -> None:
    tokenizer = make(TEXTS[language], language, tmp_path)
    assert tokenizer.settings["strip_accents"] is False
    assert "accents are kept" in capsys.readouterr().out
    normalization = read_manifest(tmp_path / "vocab", "vocab", "--output")["metrics"]["normalization"]
    assert normalization["words_that_stripping_changes"] > 0.3
    assert not normalization["strip_accents"]


GERMAN = "Am Abend ging der alte Müller durch das Dorf und grüßte die Leute vor ihren Häusern. "


def test_only_english_and_chinese_are_lowercased_by_default(tmp_path: Path, capsys) -> None:
    for language, text, is_lowercase in (("de", GERMAN, False), ("en", ENGLISH, True), ("zh", "今天天气 OK。", True)):
        folder = tmp_path / language
        tokenizer = make(text, language, folder)
        assert tokenizer.settings["do_lower_case"] is is_lowercase
        assert ("case is kept" in capsys.readouterr().out) is not is_lowercase
        theirs = AutoTokenizer.from_pretrained(folder / "vocab")
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode_text(text)
    assert {"Müller", "Dorf", "Häusern"} <= set(Tokenizer.load(tmp_path / "de" / "vocab").tokens)
    lowercase = make(GERMAN, "de", tmp_path / "lower", "vocab.lowercase=yes")
    assert lowercase.settings["do_lower_case"]
    assert {"müller", "häusern"} <= set(lowercase.tokens)


def test_the_characters_removed_most_often_are_reported(tmp_path: Path, capsys) -> None:
    rare = "a\u00adb c\u200fd e\ufefff " + "کتاب خانه " * 60
    text = "می\u200cخواهم کتاب\u200cها خانه"
    make(f"{text}\n{rare}\n" + f"{text} " * 60, "fa", tmp_path)
    output = capsys.readouterr().out
    assert "removes U+200C (ZERO WIDTH NON-JOINER) from 3" in output
    make("bien\u00advenue\u00a0!\n" * 50 + "eine\x0bzweite Zeile " * 50, "fr", tmp_path / "blanks")
    output = capsys.readouterr().out
    assert [f"removes {code}" in output for code in ("U+00AD", "U+000B", "U+00A0")] == [True, True, False]


def test_accents_of_english_are_stripped_and_reported(tmp_path: Path, capsys) -> None:
    tokenizer = make(ENGLISH + "one two three four five six seven " * 20, "en", tmp_path)
    assert tokenizer.settings["strip_accents"] is None
    assert {"naive", "cafe"} <= set(tokenizer.tokens)
    assert "accents are stripped" in capsys.readouterr().out


def test_configured_stripping_of_accents_warns_in_both_stages(tmp_path: Path, capsys) -> None:
    text = "\n\n".join(f"{HINDI}\n{number} {HINDI}" for number in range(30))
    assert make(text, "hi", tmp_path, "vocab.strip_accents=yes").settings["strip_accents"] is True
    output = capsys.readouterr().out
    assert "warning: accents are stripped" in output
    assert "vocab.strip_accents=no" in output
    config = load_config(settings=("data.max_seq_length=64", "data.dupe_factor=1"))
    make_data(config, [str(tmp_path / "a.txt")], tmp_path / "vocab", tmp_path / "data", workers=1)
    output = capsys.readouterr().out
    assert "data.language is hi" in output
    assert "warning: the vocabulary strips accents" in output


def test_accent_loss_counts_each_merged_word_once() -> None:
    loss = accent_loss({"ma": 5, "má": 3, "mà": 1, "cafés": 1, "here": 10}, lowercase=True)
    assert loss.changed == 5 / 20
    assert loss.merged == 3 / 5
    assert loss.examples == [("má", "ma"), ("cafés", "cafes"), ("mà", "ma")]


@pytest.mark.parametrize("language", ["th", "km", "my", "lo"])
def test_only_unsegmented_scripts_without_blanks_are_cut_into_clusters(language: str, tmp_path: Path) -> None:
    tokenizer = make(TEXTS[language], language, tmp_path)
    assert tokenizer.rules.split_clusters
    assert tokenizer.unk_id not in tokenizer.encode_text(TEXTS[language] * 20)  # far above 100 characters
    assert not (tmp_path / "vocab" / "vocab.txt").exists()  # its readers would not cut into clusters
    words = {"วันนี้": 5, "อากาศ": 5, "ดี": 5, "มาก": 5, "และ": 5}
    assert not is_unspaced(words)
    assert is_unspaced({"".join(words): 5})


@pytest.mark.parametrize("language", list(TEXTS))
@pytest.mark.parametrize("setting", ["vocab.strip_accents=yes", "vocab.strip_accents=no", "vocab.lowercase=yes"])
def test_ids_equal_transformers(language: str, setting: str, tmp_path: Path) -> None:
    tokenizer = make(TEXTS[language], language, tmp_path, setting)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "vocab")
    text = f"{TEXTS[language]} {HINDI} {THAI * 3} {VIETNAMESE} İI ẞ"
    encoded = theirs(text, TEXTS[language])
    ours, second = tokenizer.encode_texts([text, TEXTS[language]])
    assert encoded["input_ids"] == [tokenizer.cls_id, *ours, tokenizer.sep_id, *second, tokenizer.sep_id]
    assert encoded["token_type_ids"] == [0] * (len(ours) + 2) + [1] * (len(second) + 1)


def test_words_pattern_keeps_marks() -> None:
    assert re.findall(words_pattern(), "मैं हूँ, don't") == ["मैं", "हूँ", ",", "don", "'", "t"]
    assert mostly_without_blanks(THAI)
    assert mostly_without_blanks("これは犬です。")
    assert not mostly_without_blanks(KOREAN)

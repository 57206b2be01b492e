"""Chinese text is recognised: its language, and the words that whole-word masking means."""

import sys
from pathlib import Path

import pytest

from bert_pretrain.config import DataConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text.sources import resolve

WHOLE = "data.whole_word_mask=true"


@pytest.mark.parametrize(
    ("settings", "language", "segmenter"),
    [
        ([], "zh", None),
        ([WHOLE], "zh", "jieba"),
        ([WHOLE, "data.word_segmenter=characters", "data.language=ja"], "ja", None),
    ],
)
def test_chinese_is_recognised(
    settings: list[str], language: str, segmenter: str | None, chinese_text: Path, vocab_folder: Path, tmp_path: Path
) -> None:
    config = load_config(settings=["data.dupe_factor=1", *settings])
    found = DataFolder.open(make_data(config, [str(chinese_text)], vocab_folder, tmp_path / "data", workers=1)).config
    assert (found.language, found.word_segmenter) == (language, segmenter)


def test_records_of_english_with_escaped_chinese_stay_english(vocab_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "An English text of some words. \\u4e2d\\u6587"}\n' * 9)
    config = load_config(settings=["data.drop_duplicates=false", WHOLE])
    found = DataFolder.open(make_data(config, [str(path)], vocab_folder, tmp_path / "data", workers=1)).config
    assert (found.language, found.word_segmenter) == ("en", None)


def test_a_segmenter_that_is_missing_is_named_with_the_way_around_it(
    chinese_text: Path, vocab_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rjieba", None)
    with pytest.raises(ConfigError) as caught:
        make_data(load_config(settings=[WHOLE]), [str(chinese_text)], vocab_folder, tmp_path / "data", workers=1)
    assert "[chinese]" in caught.value.remedy
    assert "data.word_segmenter=characters" in caught.value.remedy


@pytest.mark.parametrize(("joint", "layout"), [("\n", ("blank_line", "lines")), ("", ("file", "sentencex"))])
def test_the_layout_of_chinese_is_recognised_before_its_language(
    joint: str, layout: tuple[str, str], chinese_documents: list[list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(joint.join(document) for document in chinese_documents), encoding="utf-8")
    for language in ("auto", "zh"):
        (source,) = resolve([str(path)], DataConfig(language=language))
        assert (source.boundary, source.splitter) == layout

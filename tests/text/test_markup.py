"""HTML that was left in a text is counted by name; what only looks like it is not."""

from pathlib import Path

import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.make_data.run import make_data
from bert_pretrain.storage.manifest import read_manifest
from bert_pretrain.text.markup import count_markup
from bert_pretrain.vocab.run import make_vocab

FOUND = {
    "a<br>b<BR/>c</br> <br />": {"<br>": 4},
    '<a href="x"\n class=y>z</a>': {"<a>": 2},
    "&nbsp;&amp;&#160;&#xA0;&eacute;": {"&nbsp;": 1, "&amp;": 1, "&#…;": 2, "&eacute;": 1},
    "vector<int> <unk> a < b > c, <br, R&D; &nosuch; & amp; <div": {},
    "<<p>>": {"<p>": 1},
}


@pytest.mark.parametrize("text", FOUND)
def test_tags_and_entities_are_counted_by_name(text: str) -> None:
    assert count_markup(text) == FOUND[text]


@pytest.fixture
def dirty(tmp_path: Path, english_documents: list[list[str]]) -> Path:
    path = tmp_path / "dirty.txt"
    documents = ("\n".join(f"{sentence}&nbsp;<br>" for sentence in document) for document in english_documents)
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return path


def test_both_stages_name_html(
    dirty: Path, english_documents: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = sum(map(len, english_documents))
    config = load_config(settings=["vocab.size=1500", "data.document_boundary=blank_line", "data.dupe_factor=1"])
    make_vocab(config, [str(dirty)], tmp_path / "vocab", workers=1)
    assert "warning: HTML in the text made tokens: br, nbsp; " in capsys.readouterr().out
    figures = read_manifest(tmp_path / "vocab", "vocab", "")["figures"]
    assert figures["tokens_of_markup"] == ["br", "nbsp"]
    make_data(config, [str(dirty)], tmp_path / "vocab", tmp_path / "data", workers=1)
    assert f"<br> ({count:,}), &nbsp; ({count:,})" in capsys.readouterr().out.replace(
        f"&nbsp; ({count:,}), <br> ({count:,})", f"<br> ({count:,}), &nbsp; ({count:,})"
    )
    assert read_manifest(tmp_path / "data", "data", "")["corpus"]["markup"] == {"<br>": count, "&nbsp;": count}


def test_plain_text_is_not_accused(
    english_text: Path, vocab_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(settings=["vocab.size=1500", "data.document_boundary=blank_line", "data.dupe_factor=1"])
    make_vocab(config, [str(english_text)], tmp_path / "vocab", workers=1)
    make_data(config, [str(english_text)], vocab_folder, tmp_path / "data", workers=1)
    assert "HTML" not in capsys.readouterr().out

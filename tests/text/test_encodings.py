"""Encodings are detected, named in errors and converted to UTF-8."""

import codecs
import io
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from bert_pretrain.text.encodings import as_utf8, likely_encoding

from .test_documents import COMPRESS, read_all, refusal, sources_of, write

TEXTS = {
    "gb18030": "那人见他年纪虽大，却是甚有精神，便向前引路，绕过大庄，走到门外。\n大家都说：这地方不错了。\n",
    "cp950": "話說天下大勢，分久必合，合久必分。\n眾人商議已定，各自回營，次日天明再行出發。\n",
    "cp932": "わたしは毎朝、駅まで歩いて行きます。途中に小さな店があり、そこで新聞を買います。\n",
    "euc_jp": "わたしは毎朝、駅まで歩いて行きます。途中に小さな店があり、そこで新聞を買います。\n",
    "cp949": "나는 아침마다 역까지 걸어갑니다. 가는 길에 작은 가게가 있어서 신문을 삽니다.\n",
    "koi8-r": "Каждое утро я хожу на станцию пешком. По дороге есть маленькая лавка, где я покупаю газету.\n",
    "cp1251": "Каждое утро я хожу на станцию пешком. По дороге есть маленькая лавка, где я покупаю газету.\n",
    "cp1252": "Le matin, je vais à la gare à pied. J’achète le journal près de l’école, où il fait très chaud l’été.\n",
    "cp1250": "Každé ráno chodím na nádraží pěšky. Cestou je malý obchod, kde si kupuji čerstvé noviny a žluté růže.\n",
    "utf-16": "那人见他年纪虽大，却是甚有精神。\nOne line in English, which has NULs.\n",
    "utf-16-le": "Each line of this text is in English, and has no byte order mark before it.\n",
    "utf-16-be": "那人见他年纪虽大，却是甚有精神，便向前引路。\n大家都说：这地方不错了。\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_in_another_encoding_is_refused_or_read_with_its_name(tmp_path: Path, name: str) -> None:
    texts = [(f"{number}. " + TEXTS[name] * 3).strip() for number in range(5)]
    path = write(tmp_path / "a.txt", "\n\n".join(texts).encode(name))
    error = refusal(path)
    assert error.where.startswith(str(path))
    assert f"--encoding {name} " in error.remedy
    for encoding in (name, "auto"):
        assert read_all(path, encoding=encoding) == (texts, Counter())


@pytest.mark.parametrize("compression", ["", ".gz"])
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".tsv"])
def test_tables_are_read_in_other_encodings(tmp_path: Path, ending: str, compression: str) -> None:
    texts = [line for line in [*TEXTS["gb18030"].splitlines(), "㐀龦，\ufffd"] for _ in range(3)]
    records = [{"text": text} for text in texts]
    content = {
        ".jsonl": "\n".join(json.dumps(record, ensure_ascii=False) for record in records),
        ".json": json.dumps(records, ensure_ascii=False),
        ".csv": "text\n" + "\n".join(texts),
        ".tsv": "id\ttext\n" + "\n".join(f"1\t{text}" for text in texts),
    }[ending]
    path = write(tmp_path / f"a{ending}{compression}", COMPRESS[compression](content.encode("gb18030")))
    assert "--encoding gb18030" in refusal(path).remedy
    assert read_all(path, encoding="auto")[0] == texts
    for name in ("gbk", "gb2312"):  # smaller sets of characters, by which such text is called
        assert read_all(f"file://{path}", encoding=name)[0] == texts


def test_auto_detects_the_encoding_of_each_file(tmp_path: Path, capsys) -> None:
    names = ["gb18030", "utf-16", "cp950", "utf-8"]
    for number, name in enumerate(names):
        write(tmp_path / f"{number}.txt", (TEXTS.get(name, "naïve") * 4).encode(name))
    assert [source.identity["encoding"] for source in sources_of(tmp_path, encoding="auto")] == names
    assert "1 of 4 inputs in cp950" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "encoding", "text"),
    [
        ("cp1252", "utf-8", TEXTS["cp1252"]),
        ("utf-16", "utf-8", "Plain English.\n"),
        ("shift_jis", "gb18030", TEXTS["gb18030"]),
        ("gb18030", "cp1252", TEXTS["cp1252"]),
        ("gb18030", "cp950", TEXTS["cp950"] + "他說：這是一個好地方，我們可以在這裡住下來。\n"),
        ("big5", "gb18030", "他说：这是一个好地方，我们可以在这里住下来。\n"),
    ],
)
def test_wrong_encoding_is_refused_with_the_likely_one(tmp_path: Path, named, encoding, text) -> None:
    error = refusal(write(tmp_path / "a.txt", (text * 20).encode(encoding)), encoding=named)
    assert named in error.what.lower()
    assert f"--encoding {encoding} " in error.remedy


def test_damaged_text_keeps_its_encoding(tmp_path: Path) -> None:
    """A few invalid bytes are replaced; if most non-ASCII bytes are invalid, the text is not UTF-8."""
    draw = random.Random(1)
    content = bytearray((TEXTS["gb18030"] * 200).encode())
    for _ in range(40):
        content[draw.randrange(len(content))] = 0xFF
    _, counts = read_all(write(tmp_path / "a.txt", bytes(content)))
    assert 40 <= counts["invalid_utf8_characters"] < 200
    english = "Some ordinary English words, again and again. " * 500
    _, counts = read_all(write(tmp_path / "b.txt", english.encode() + b"caf\xe9"))
    assert counts == {"invalid_utf8_characters": 1}
    assert "cp1252" in refusal(write(tmp_path / "c.txt", (english[:500] + "café.\n").encode("cp1252"))).remedy
    lost = ("Caf\ufffd " * 50).strip()  # by a conversion before
    assert read_all(write(tmp_path / "d.txt", lost)) == ([lost], Counter())
    noise = write(tmp_path / "e.txt", draw.randbytes(5000))
    for name in ("utf-8", "auto"):
        assert "--encoding" not in refusal(noise, encoding=name).remedy


def test_few_accents_are_enough_to_detect_an_encoding(tmp_path: Path) -> None:
    text = "Some ordinary English words, again and again. " * 400 + "The café of Müller and Brontë is naïve. " * 4
    path = write(tmp_path / "a.txt", (text * 3).encode("cp1252"))
    assert read_all(path, encoding="auto") == ([(text * 3).strip()], Counter())


def test_damaged_text_in_another_encoding_is_recognised_and_counted(tmp_path: Path) -> None:
    lines = (TEXTS["gb18030"] * 300).encode("gb18030").split(b"\n")
    lines[5] += b"\xff"
    lines[40] += b"\xff\xff"
    path = write(tmp_path / "a.txt", b"\n".join(lines))
    assert likely_encoding(path.read_bytes()) == "gb18030"
    (text,), counts = read_all(path, encoding="auto")
    assert text.count("\ufffd") == counts["invalid_gb18030_characters"] == 3
    assert refusal(path, encoding="gb18030", strict=True).where == f"{path}: line 6"


@pytest.mark.parametrize("name", ["gb18030", "shift_jis", "utf-16", "utf-8-sig", "iso2022_jp"])
def test_conversion_to_utf8_is_independent_of_read_sizes(name: str) -> None:
    draw = random.Random(1)
    text = "".join(draw.choices("ab\n 日本人。", k=100_000))
    stream = as_utf8(io.BytesIO(text.encode(name)), codecs.lookup(name).name)
    found = b""
    while block := stream.read(draw.randint(1, 20_000)):
        found += block
    assert found.decode() == text


def test_sample_may_end_inside_a_character(tmp_path: Path) -> None:
    text = json.dumps([{"text": TEXTS["gb18030"] * 20_000}], ensure_ascii=False)  # one line
    for shift in range(3):
        path = write(tmp_path / f"{shift}.json", (" " * shift + text).encode("gb18030"))
        (source,) = sources_of(path, encoding="auto")
        assert source.encoding == "gb18030"

"""`vocab --extend`: new tokens and the unchanged rest of the vocabulary."""

from pathlib import Path

import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, InputError, OutputError
from bert_pretrain.io.manifest import read_manifest
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.extend import extend_vocabulary, missing_characters
from bert_pretrain.vocab.run import make_vocab
from bert_pretrain.vocab.wordpiece import special_tokens
from tests.conftest import call, digests

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = [*LETTERS, *(f"##{letter}" for letter in LETTERS), ".", ",", "the", "river", "##ing"]


def old_tokenizer(slots: int = 3) -> Tokenizer:
    tokens = [*special_tokens(slots), *PIECES]
    return Tokenizer(tokens, lowercase=True, strip_accents=None, handle_chinese_chars=True)


def extended(words: dict[str, int], add_tokens: int | None = None, slots: int = 3) -> list[tuple[str, int]]:
    tokenizer, added = extend_vocabulary(words, old_tokenizer(slots), add_tokens=add_tokens, min_frequency=2)
    assert [tokenizer.tokens[token["id"]] for token in added] == [token["token"] for token in added]
    return [(token["token"], token["id"]) for token in added]


def test_words_are_added_by_saved_pieces_then_alphabetically() -> None:
    words = {"the": 900, "riving": 6, "ox": 10, "ax": 10, "abc": 6, "rare": 1}
    # riving: r ##i ##v ##ing saves 3 x 6; abc 2 x 6; ax and ox 10 each; "rare" is too rare, "the" is one piece.
    assert extended(words) == [("riving", 1), ("abc", 2), ("ax", 3)]
    assert extended(words, add_tokens=2) == [("riving", 1), ("abc", 2)]
    end = len(old_tokenizer().tokens)
    assert extended(words, add_tokens=99) == [("riving", 1), ("abc", 2), ("ax", 3), ("ox", end)]
    assert extended(dict(reversed(words.items())), add_tokens=99) == extended(words, add_tokens=99)
    # 4 of a million characters are no reason to add ℓ, but the word itself is worth as much as if it were cut in two.
    words = {"the": 333_000, "aℓ": 4, "ax": 5, "ox": 3}
    assert extended(words) == [("ax", 1), ("aℓ", 2), ("ox", 3)]
    with pytest.raises(ConfigError, match="no unused slots"):
        extended({"ox": 9}, slots=0)
    assert extended({"ox": 9}, add_tokens=1, slots=0) == [("ox", old_tokenizer(0).vocab_size)]


def test_missing_characters_are_added_before_words() -> None:
    words = {"ß": 5, "maß": 30, "œber": 20, "ox": 500, "rare中": 1}
    # Inside a word "ß" is lost 30 times, alone 5 times; "œ" begins a word 20 times.
    assert missing_characters(words, old_tokenizer(), 2) == [("##ß", 30), ("œ", 20), ("ß", 5)]
    old = old_tokenizer(4)
    tokenizer, added = extend_vocabulary(words, old, add_tokens=5, min_frequency=2)
    assert [token["token"] for token in added] == ["##ß", "œ", "ß", "ox", "maß"]
    assert (added[0]["pieces"], added[3]["pieces"], added[3]["count"]) == (["[UNK]"], ["o", "##x"], 500)
    assert (tokenizer.tokens[0], tokenizer.tokens[5:-1]) == ("[PAD]", old.tokens[5:])
    assert tokenizer.unk_id not in tokenizer.encode_text("ß maß")
    assert missing_characters({"the": 10**6, "ß": 20}, old, 2) == []  # rare characters leave the slots to words


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "domain.txt"
    path.write_text("The River flooding, OX and riving. Zebra flooding.\n\n" * 300, encoding="utf-8")
    return path


def test_extended_vocabulary_opens_in_transformers(text, tmp_path, capsys) -> None:
    from transformers import AutoTokenizer

    old, new = tmp_path / "old", tmp_path / "new"
    tokens = [*special_tokens(5), *PIECES, *LETTERS.upper(), *(f"##{letter}" for letter in LETTERS.upper())]
    cased = Tokenizer(tokens, lowercase=False, strip_accents=None, handle_chinese_chars=True)
    cased.save(old)

    def command(*settings: str) -> Path:
        return make_vocab(load_config(settings=settings), [str(text)], new, extend=old, workers=1)

    ours, theirs = Tokenizer.load(command()), AutoTokenizer.from_pretrained(new)
    assert (ours.settings, {"River", "Zebra"} - set(ours.tokens)) == (cased.settings, set())
    for line in ("Flooding OX", "the riving Zebra, unseen."):
        assert theirs(line, add_special_tokens=False)["input_ids"] == ours.encode_text(line)
    found = read_manifest(new, "vocab", "")["metrics"]
    assert found["extends"] == {"folder": str(old), "hash": Tokenizer.load(old).hash, "vocab_size": cased.vocab_size}
    first = {name: found["added"][0][name] for name in ("token", "id", "pieces")}
    assert first == {"token": "flooding", "id": 1, "pieces": ["f", "##l", "##o", "##o", "##d", "##ing"]}
    assert found["pieces_per_word"] < 1.3 < found["before"]["pieces_per_word"]
    before = digests(new)
    command()
    command("vocab.size=9000")  # decides nothing here
    assert capsys.readouterr().out.count("up to date") == 2
    with pytest.raises(OutputError, match="add_tokens: None -> 2"):
        command("vocab.add_tokens=2")
    old_tokenizer(7).save(old)
    with pytest.raises(OutputError, match="extends"):
        command()
    assert digests(new) == before


def test_nothing_to_add_and_conflicting_flags_are_refused(text: Path, tmp_path: Path) -> None:
    old_tokenizer(5).save(tmp_path / "old")
    (tmp_path / "known.txt").write_text("the river\n" * 50)
    with pytest.raises(InputError, match="already has every frequent word"):
        make_vocab(load_config(), [str(tmp_path / "known.txt")], tmp_path / "a", extend=tmp_path / "old", workers=1)
    extend = ["--extend", str(tmp_path / "old")]
    for flags, code in (
        ([*extend, "--vocab-size", "900"], 2), (["--add-tokens", "7"], 2),
        ([*extend, "--set", "vocab.strip_accents=no"], 2), ([*extend, "--add-tokens", "2"], 0),
    ):  # fmt: skip
        call("vocab", text, "--output", tmp_path / "b", *flags, code=code)
    assert len(read_manifest(tmp_path / "b", "vocab", "")["metrics"]["added"]) == 2

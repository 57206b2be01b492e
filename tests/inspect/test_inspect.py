"""`inspect` shows the stored data, passes valid folders and reports every kind of damage."""

import html
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import DataError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.examples.shards import ShardRecord, read_shard, write_shard
from bert_pretrain.inspect.checks import CHECKS
from bert_pretrain.inspect.inspect import inspect
from bert_pretrain.inspect.inspection import Inspection, inspect_rows
from bert_pretrain.inspect.rendering import render_rows
from bert_pretrain.io.files import read_json, write_json
from bert_pretrain.make_data.run import make_data
from bert_pretrain.text.tokenizer import Tokenizer
from tests.conftest import call
from tests.train.conftest import flip_bit

Change = Callable[[Examples, Tokenizer], Examples]


def inspected(path: Path) -> Inspection:
    folder = DataFolder(path, read_json(path / "manifest.json"))
    return inspect_rows(folder, "train", [0], all_shards=True, workers=1)


def rewritten(data: Path, place: Path, change: Change, shard: int = 0) -> Path:
    """Copy a data folder, change one training shard and update the manifest, so that hashes and counts match."""
    shutil.copytree(data, place)
    manifest = read_json(place / "manifest.json")
    entry = manifest["splits"]["train"]
    record = ShardRecord(**entry["shards"][shard])
    examples = change(read_shard(place, record), Tokenizer.load(place / "tokenizer"))
    entry["shards"][shard] = asdict(write_shard(place, record.path, examples))
    for name in ("rows", "tokens"):
        entry[name] = sum(each[name] for each in entry["shards"])
    write_json(place / "manifest.json", manifest)
    return place


def column(name: str, index: Any, value: Any) -> Change:
    """Return a change of one value of a column; `index` and `value` may be functions, `value` may be a token."""

    def change(examples: Examples, tokenizer: Tokenizer) -> Examples:
        table: Any = examples.masks if name in ("positions", "original_ids") else examples
        values = getattr(table, name).copy()
        new = value(examples) if callable(value) else value
        new = tokenizer.tokens.index(new) if isinstance(new, str) else new
        values[index(examples) if callable(index) else index] = new
        changed = replace(table, **{name: values})
        return changed if table is examples else replace(examples, masks=changed)

    return change


def without_one_prediction(examples: Examples, _tokenizer: Tokenizer) -> Examples:
    """Remove a prediction: show the original token and do not predict it."""
    masks, input_ids = examples.masks, examples.input_ids.copy()
    input_ids[examples.masked_indices[17]] = masks.original_ids[17]
    kept = np.arange(len(masks.positions)) != 17
    offsets = masks.offsets - (masks.offsets > 17)
    return replace(examples, input_ids=input_ids, masks=Masks(masks.positions[kept], masks.original_ids[kept], offsets))


def too_long(examples: Examples, _tokenizer: Tokenizer) -> Examples:
    """Repeat the last text token of the first example until it has 65 tokens."""
    end = int(examples.offsets[1]) - 1
    more = 65 - int(examples.lengths[0])
    longer = np.insert(examples.input_ids, [end] * more, examples.input_ids[end - 1])
    return replace(examples, input_ids=longer, offsets=examples.offsets + more * (np.arange(len(examples) + 1) > 0))


def with_flipped_label(examples: Examples, tokenizer: Tokenizer) -> Examples:
    rarer = int(np.bincount(examples.next_sentence_label).argmin())
    first = int(np.flatnonzero(examples.next_sentence_label == rarer)[0])
    return column("next_sentence_label", first, 1 - rarer)(examples, tokenizer)


def unpredicted(examples: Examples) -> int:
    """Return the index of a text token that is not predicted."""
    start = int(examples.offsets[7])
    return int(np.setdiff1d(np.arange(start + 1, start + 20), examples.masked_indices)[0])


DAMAGES: dict[str, tuple[Change, str]] = {
    "no masks": (lambda examples, _: replace(examples, masks=None), "shards"),
    "a position beyond its example": (column("positions", 0, lambda rows: rows.lengths[0]), "masked positions"),
    "labels uneven": (with_flipped_label, "labels"),
    "too long": (too_long, "lengths"),
    "no A": (column("segment_b_start", 4, 1), "segments"),
    "B behind the end": (column("segment_b_start", 4, 60000), "segments"),
    "unknown id": (column("input_ids", 40, 60000), "token ids"),
    "[PAD] masked": (column("original_ids", 5, "[PAD]"), "token ids"),
    "position on [CLS]": (column("positions", 0, 0), "masked positions"),
    "position on the last [SEP]": (
        column("positions", lambda rows: rows.masks.offsets[1] - 1, lambda rows: rows.lengths[0] - 1),
        "masked positions",
    ),
    "position twice": (column("positions", 1, lambda rows: rows.masks.positions[0]), "masked positions"),
    "[UNK] put in": (column("input_ids", lambda rows: rows.masked_indices[3], "[UNK]"), "special tokens"),
    "[MASK] that nobody predicts": (column("input_ids", unpredicted, "[MASK]"), "special tokens"),
    "[SEP] in the text": (column("input_ids", unpredicted, "[SEP]"), "special tokens"),
    "no [CLS]": (column("input_ids", lambda rows: rows.offsets[2], "the"), "special tokens"),
    "one prediction too few": (without_one_prediction, "predictions"),
}


@pytest.mark.parametrize(("change", "name"), DAMAGES.values(), ids=DAMAGES)
def test_each_damage_fails_one_check(data_folder: Path, tmp_path: Path, change: Change, name: str) -> None:
    inspection = inspected(rewritten(data_folder, tmp_path / "data", change))
    assert inspection.failed == [name]
    (failure,) = inspection.failures[name]
    assert "train/00000.parquet" in failure


def test_first_bad_row_is_numbered_in_the_split(data_folder, tmp_path) -> None:
    folder = rewritten(data_folder, tmp_path / "data", column("next_sentence_label", 5, 9), shard=1)
    row = DataFolder.open(folder).shards("train")[0].rows + 5
    assert inspected(folder).failures["labels"] == [f"train/00001.parquet: 1 of the examples, first train row {row}"]
    assert f"train row {row}: " in call("inspect", folder, "--row", row, code=1).stdout


@pytest.mark.parametrize("name", ["rows", "tokens"])
def test_wrong_counts_in_the_manifest_are_reported(data_folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(data_folder, tmp_path / "data")
    manifest = read_json(tmp_path / "data" / "manifest.json")
    entry = manifest["splits"]["train"]
    for each in (entry, entry["shards"][-1]):
        each[name] += 10**15
    write_json(tmp_path / "data" / "manifest.json", manifest)
    assert inspected(tmp_path / "data").failed == ["shards"]
    folder = DataFolder(tmp_path / "data", manifest)
    with pytest.raises(DataError, match=name):  # training refuses it too
        read_shard(folder.path, folder.shards("train")[-1])
    call("inspect", folder.path, "--row", folder.rows("train") - 1, code=1)  # a row that exists only in the manifest


@pytest.mark.parametrize(
    "settings", [["next_sentence=sop"], ["next_sentence=none", "whole_word_mask=true"], ["masking=dynamic"]]
)
def test_every_objective_is_checked_by_its_rules(tmp_path, english_text, vocab_folder, settings) -> None:
    config = load_config(settings=[f"data.{setting}" for setting in (*settings, "max_seq_length=64", "dupe_factor=1")])
    folder = make_data(config, [str(english_text)], vocab_folder, tmp_path / "data", workers=1)
    inspection = inspected(folder)
    assert inspection.failed == []
    assert ("labels" in inspection.failures) == (config.data.next_sentence != "none")
    titles = {row[0]: row[1] for row in inspection.statistics}
    labels = {"nsp": ["is-next"], "sop": ["in order"], "none": []}[config.data.next_sentence]
    assert [name for name in ("is-next", "in order") if name in titles] == labels
    assert bool(titles["share of masked tokens"]) == (config.data.masking == "static")  # of train
    output = call("inspect", folder, "--rows", 2, "--html", tmp_path / "page.html").stdout
    assert ("masks drawn in training" in output) == (config.data.masking == "dynamic")
    padded = rewritten(folder, tmp_path / "pad", column("input_ids", unpredicted, "[PAD]"))
    assert inspected(padded).failed == ["special tokens"]


def test_damaged_shard_is_reported_and_the_others_are_counted(data_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(data_folder, tmp_path / "data")
    shard = folder / "train" / "00000.parquet"
    flip_bit(shard)
    output = call("inspect", folder, "--stats", "--html", tmp_path / "page.html", code=1).stdout
    assert "train/00000.parquet" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "train/00000.parquet" in output
    assert "train/00001.parquet" not in output
    assert "shown as [MASK]" in output
    shard.unlink()
    assert "train/00000.parquet" in call("inspect", folder, "--row", "0", code=1).stdout


def test_valid_folder_passes_and_its_statistics_match_the_examples(data_folder: Path) -> None:
    inspection = inspected(data_folder)
    assert inspection.failed == []
    assert list(inspection.failures) == list(CHECKS)
    rows = {row[0].strip(): row[1:] for row in inspection.statistics}
    assert rows[""] == ["train", "validation", "configuration"]
    for place, (split, entry) in enumerate(inspection.folder.manifest["splits"].items()):
        shards = [read_shard(data_folder, record) for record in inspection.folder.shards(split)]
        assert rows["examples"][place] == f"{entry['rows']:,}"
        assert rows["tokens"][place] == f"{entry['tokens']:,}"
        assert rows["longest example"][place] == str(max(int(shard.lengths.max()) for shard in shards))
        for title, name in (("is-next", "is_next_share"), ("shown as [MASK]", "masked_shown_as_mask_share")):
            assert rows[title][place] == f"{entry['statistics'][name]:.2%}"
    titles = ("longest example", "is-next", "share of masked tokens", "shown as [MASK]")
    assert [rows[title][2] for title in titles] == ["64", "50.00%", "15.00%", "80.00%"]


def test_rendered_tokens_equal_stored_tokens(data_folder: Path) -> None:
    folder = DataFolder.open(data_folder)
    tokenizer, (before, record) = folder.tokenizer(), folder.shards("train")[:2]
    examples, first = read_shard(data_folder, record), before.rows
    rendered = render_rows(folder, "train", [first + 2, first, 1], tokenizer)
    assert [example.row for example in rendered] == [first + 2, first, 1]
    for example in rendered[:2]:
        row = example.row - first
        one = examples.take(np.array([row]))
        split = int(one.segment_b_start[0])
        for values, name in ((one.input_ids, "shown"), (one.original_ids, "original")):
            for (_, tokens), ids in zip(example.segments, (values[1 : split - 1], values[split:-1]), strict=True):
                shown = [getattr(token, name).removeprefix("##") for token in tokens]
                assert shown == [tokenizer.tokens[token_id].removeprefix("##") for token_id in ids]
        kinds = [token.kind for _, tokens in example.segments for token in tokens]
        assert len(kinds) - kinds.count("plain") == example.num_masked == len(one.masks.positions)
        assert example.label == ("B follows A" if one.next_sentence_label[0] == 0 else "B is from another document")


def test_rows_are_chosen_by_number_or_seed(data_folder: Path) -> None:
    def rows(*arguments: str) -> list[str]:
        lines = call("inspect", data_folder, *arguments).stdout.splitlines()
        return [line.split(":")[0] for line in lines if " row " in line]

    assert rows("--row", "7", "--row", "3") == ["train row 7", "train row 3"]
    call("inspect", data_folder, "--row", "7", "--rows", "2", code=2)
    assert rows("--rows", "5") == rows("--rows", "5", "--seed", "0") != rows("--rows", "5", "--seed", "1")
    assert all(row.startswith("validation row") for row in rows("--rows", "2", "--split", "validation"))
    assert rows("--stats") == []


def test_output_without_colours_has_the_same_marks(data_folder: Path, monkeypatch, capsys) -> None:
    def output() -> str:
        assert inspect(data_folder, rows=4)
        return capsys.readouterr().out

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    plain = output()
    assert "\x1b" not in plain
    assert "⟨[MASK]→" in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[" in output()
    monkeypatch.setenv("NO_COLOR", "1")
    assert output() == plain


def test_closed_output_is_not_an_error(data_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # the descriptor was closed at the start
    assert inspect(data_folder, rows=1, stats=True)


EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'


def test_page_loads_nothing_and_escapes_all_text(data_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "<b onclick=alert(3)>data"
    shutil.copytree(data_folder, folder)
    tokens = list(Tokenizer.load(folder / "tokenizer").tokens)
    tokens[tokens.index("the")], tokens[tokens.index("of")] = EVIL, "\u009b2J\u202e"
    evil = Tokenizer(tokens, lowercase=True, strip_accents=None, handle_chinese_chars=True)
    evil.save(folder / "tokenizer")
    manifest = read_json(folder / "manifest.json")
    manifest["tokenizer"]["hash"] = evil.hash
    write_json(folder / "manifest.json", manifest)
    page = tmp_path / "page.html"
    output = call("inspect", folder, "--html", page, "--rows", "12").stdout
    assert "\u009b" not in output
    assert "\u202e" not in output
    content = page.read_text(encoding="utf-8")
    tags = re.findall(r"<(\w+)([^>]*)>", content)
    assert {"table", "article", "style"} <= {tag for tag, _ in tags}
    assert {"script", "img", "link", "iframe", "object", "base"}.isdisjoint(tag for tag, _ in tags)
    assert not [rest for _, rest in tags if re.search(r"\s(on\w+|src|href)=", rest)]
    assert EVIL not in content
    assert EVIL in html.unescape(content)
    assert "default-src 'none'" in content
    assert not re.search(r"url\(|@import|\x9b", content)

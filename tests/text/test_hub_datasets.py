"""Datasets with splits: `train` is trained on and `validation` is held out."""

from pathlib import Path

import datasets
import pytest

from .test_documents import as_jsonl, read_all, refusal, sources_of, write


def save(folder: Path, *names: str) -> str:
    """Save a dataset with a row in each split, except in a split of the name `empty`."""
    texts = {name: [f"One. Two. {name}"] * (name != "empty") for name in names}
    splits = {name: datasets.Dataset.from_dict({"text": texts[name]}) for name in names}
    datasets.DatasetDict(splits).save_to_disk(folder)
    return str(folder)


def described(*inputs: str, **settings: object) -> list[tuple[str, bool]]:
    return [(Path(source.location).name, source.is_validation) for source in sources_of(*inputs, **settings)]


@pytest.mark.parametrize("prefix", ["", "dataset:"])
def test_validation_is_held_out_and_test_is_not_read(tmp_path: Path, capsys, prefix: str) -> None:
    saved = prefix + save(tmp_path / "saved", "train", "test", "validation")
    assert described(saved) == [("saved@train", False), ("saved@validation", True)]
    said = capsys.readouterr().out
    assert said.startswith(f"{saved}: ")
    assert all(f"'{name}' is " in said for name in ("train", "validation", "test"))
    assert read_all(saved)[0] == ["One. Two. train", "One. Two. validation"]
    assert read_all(f"{saved}@test")[0] == ["One. Two. test"]
    assert sources_of(saved)[0].absolute.location == saved + "@train"
    assert described(save(tmp_path / "a", "train", "test")) == [("a@train", False)]
    assert described(save(tmp_path / "b", "only")) == [("b", False)]
    assert read_all(tmp_path / "b")[0] == ["One. Two. only"]


def test_configured_validation_replaces_the_validation_split(tmp_path: Path) -> None:
    first, second = save(tmp_path / "first", "train", "dev"), save(tmp_path / "second", "train", "val")
    assert described(first, validation=(second,)) == [("first@train", False), ("second@val", True)]
    both = [("first@train", False), ("second@train", False), ("first@dev", True), ("second@val", True)]
    assert described(first, second) == both
    (train, _) = sources_of(first, validation=(f"{first}@dev",), input_weights={first: 3.0})
    assert (train.weight, train.split) == (3.0, "train")


def test_a_dataset_with_two_spellings_is_given_twice(tmp_path: Path, monkeypatch) -> None:
    saved = save(tmp_path / "saved", "only")
    monkeypatch.chdir(tmp_path)
    for other in (f"{saved}/", f"dataset:{saved}", "saved"):
        assert "given twice" in refusal(saved, other).what


def test_missing_split_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", "left", "right")
    for asked, named in ((saved, "'train'"), (f"{saved}@middle", "'middle'")):
        error = refusal(asked)
        assert named in error.what
        assert f"{saved}@left" in error.remedy
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "plain"))
    assert "'text'" in refusal(f"{tmp_path}/plain@text").what
    saved = save(tmp_path / "some", "train", "empty")
    assert read_all(saved)[0] == ["One. Two. train"]
    assert "without rows" in refusal(f"{saved}@empty").remedy


def test_splits_of_a_named_dataset_are_read_separately(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / "set" / f"{split}.jsonl", as_jsonl([f"One. {split}", f"Two. {split}"]))
    assert read_all(f"dataset:{tmp_path}/set")[0] == ["One. train", "Two. train"]
    assert read_all(f"dataset:{tmp_path}/set@test")[0] == ["One. test", "Two. test"]
    assert read_all(f"dataset:{tmp_path}/set@train[:1]")[0] == ["One. train"]
    assert "nosuch" in str(refusal(f"dataset:{tmp_path}/set@nosuch"))
    assert "nosuch" in refusal(f"dataset:{tmp_path}/nosuch").where


def test_truncated_file_of_a_saved_dataset_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", "train")
    (file,) = (tmp_path / "saved" / "train").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-200])
    assert "damaged" in refusal(f"{saved}@train").remedy


def test_saved_dataset_inside_a_folder_is_named_and_not_read(tmp_path: Path, capsys) -> None:
    save(tmp_path / "corpus" / "saved", "train")
    write(tmp_path / "corpus" / "a.jsonl", as_jsonl(["alone"]))
    assert read_all(tmp_path / "corpus")[0] == ["alone"]
    assert f"dataset:FOLDER (first: {tmp_path}/corpus/saved)" in capsys.readouterr().out


def test_unreadable_row_of_a_dataset_is_an_error(tmp_path: Path) -> None:
    rows = as_jsonl([f"Number {number}." for number in range(50)])
    write(tmp_path / "set" / "x.jsonl", rows + b'{"text": "broken\n')
    assert f"{tmp_path}/set" in refusal(f"dataset:{tmp_path}/set").where

"""JSON and folders with checksums: flipped bits are detected, and unreadable JSON is a DataError."""

import json
from pathlib import Path

import pytest

from bert_pretrain.errors import DataError
from bert_pretrain.io import files
from bert_pretrain.io.files import (
    CHECKSUMS,
    damage_of_folder,
    has_checksums,
    read_json,
    write_checked_json,
    write_checksums,
)


def flips(content: bytes) -> list[bytes]:
    """Return copies of the content, each with one bit of another byte flipped."""
    return [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in range(len(content))]


def test_flipped_bit_never_changes_value_of_checked_json(tmp_path: Path) -> None:
    value = {"used_seconds": 90.5, "name": "größer", "parts": [[0, 80], [80, 90]], "more": {"2": None, "10": 1e-12}}
    path, refused = tmp_path / "file.json", 0
    write_checked_json(path, value)
    assert read_json(path) == value
    for content in flips(path.read_bytes()):
        path.write_bytes(content)
        try:
            loaded = read_json(path)
        except DataError:
            refused += 1
        else:
            assert {key: loaded.get(key) for key in value} == value  # the bit was in the key of the checksum
    assert refused > 0.9 * path.stat().st_size


@pytest.mark.parametrize("text", ["[" * 200 + "]" * 200, '{"a":' * 99_999, "", '"\ud800', " " * (1 << 20) + "{}", None])
def test_json_without_checksum_is_limited_in_size_and_depth(tmp_path, monkeypatch, text) -> None:
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 1 << 20)
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "bert"}')
    assert read_json(path) == {"model_type": "bert"}
    path.unlink() if text is None else path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(DataError) as caught:
        read_json(path)
    assert caught.value.where == str(path)


def test_damage_of_a_folder_or_its_checksums_is_detected(tmp_path: Path) -> None:
    for name in ("weights", "config"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    with pytest.raises(FileNotFoundError, match="gone"):
        write_checksums(tmp_path, ("weights", "gone"))
    assert not has_checksums(tmp_path)
    write_checksums(tmp_path)
    (tmp_path / "README.md").write_text("another card")
    assert damage_of_folder(tmp_path) is None
    for path in (tmp_path / "weights", tmp_path / "config"):
        content = path.read_bytes()
        for broken in [*flips(content)[::7], content[:-1], None]:
            path.unlink() if broken is None else path.write_bytes(broken)
            assert path.name in str(damage_of_folder(tmp_path))
            assert damage_of_folder(tmp_path, {"weights", "config"} - {path.name}) is None
        path.write_bytes(content)
    sums = (tmp_path / CHECKSUMS).read_bytes()
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("/dev/zero", "../a", "endless"):
        (tmp_path / CHECKSUMS).write_text(json.dumps({name: {"bytes": 0, "sha256": ""}}))
        assert damage_of_folder(tmp_path) is not None
    (tmp_path / "endless").unlink()
    for broken in [b"[1]", *flips(sums)]:
        (tmp_path / CHECKSUMS).write_bytes(broken)
        assert damage_of_folder(tmp_path) or json.loads(broken) == json.loads(sums)

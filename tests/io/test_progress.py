"""Progress bars: in place on a terminal, lines of their own anywhere else."""

import io

import pytest
from tqdm import tqdm

from bert_pretrain.io.pool import progress_bar
from bert_pretrain.text.documents import progress_of
from bert_pretrain.text.sources import Source
from bert_pretrain.text.text_files import ByteRange


class Stream(io.StringIO):
    """Standard output and standard error in one."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def use_bar(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> str:
    stream = Stream(is_terminal=is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("sys.stdout", stream)
    with progress_bar(total=3, desc="work", unit="step") as bar, progress_bar(total=2, desc="inner", leave=False):
        bar.update(1)
        tqdm.write("a line")
        bar.refresh()
        print("another line")
    return stream.getvalue()


def test_in_a_log_file_bars_and_lines_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = use_bar(monkeypatch, is_terminal=False).split("\n")
    assert {"a line", "another line"} < set(lines)
    assert not any("\r" in line or "\x1b" in line for line in lines)
    assert [line[:9] for line in lines if line.startswith("work")] == ["work:   0", "work:  33", "work:  33"]
    assert lines[-1] == ""


def test_on_a_terminal_bars_stay_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\rwork:   0%" in use_bar(monkeypatch, is_terminal=True)


def test_bytes_are_counted_only_where_all_sizes_are_known() -> None:
    file, dataset = ByteRange(Source("a.txt", "txt", 7, "")), ByteRange(Source("dataset:a", "dataset", None, ""))
    assert progress_of([[file, file], [file]]) == {"unit": "B", "weights": [14.0, 7.0]}
    assert progress_of([[file, file], [dataset]]) == {"unit": "part", "weights": [2, 1]}

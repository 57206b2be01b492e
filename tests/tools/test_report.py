"""`report` draws what the metrics hold."""

import json
import sys
from pathlib import Path

import pytest

from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.tools.report import draw_curves, read_metrics

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    names = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
    lines = [{"step": step, **dict.fromkeys(names, 1.0 / (step + 1))} for step in range(10, 50, 10)]
    lines += [{"step": step, **{f"validation_{name}": 0.5 for name in names}} for step in (0, 40)]
    lines.append({"step": 50, **dict.fromkeys(names)})  # every step of the interval was skipped
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 60, "ml')
    return folder


def test_one_and_several_runs_become_a_picture(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw_curves([run], tmp_path / "new" / "curves.png").read_bytes().startswith(PNG)
    assert "<svg" in draw_curves([run, run], tmp_path / "curves.svg").read_text()
    with pytest.raises(ConfigError, match="no ending of a picture"):
        draw_curves([run], tmp_path / "curves.txt")


def test_a_run_without_pairs_has_no_panels_of_them(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "next sentence" in draw_curves([run], tmp_path / "pairs.svg").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    lines = [{name: None if "nsp" in name else value for name, value in line.items()} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = draw_curves([run], tmp_path / "none.svg").read_text()
    assert "masked words" in drawn
    assert "next sentence" not in drawn


def test_a_line_that_is_being_written_is_left_out(run: Path) -> None:
    assert read_metrics(run)[-1]["step"] == 50


def test_runs_without_figures_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        draw_curves([tmp_path], tmp_path / "curves.png")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="no figures yet"):
        draw_curves([run], tmp_path / "curves.png")
    (run / "metrics.jsonl").write_text('{"step": 1}\nnothing\n')
    with pytest.raises(DataError) as caught:
        draw_curves([run], tmp_path / "curves.png")
    assert caught.value.where.endswith("metrics.jsonl:2")


def test_without_matplotlib_the_message_says_what_to_install(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib is not installed"):
        draw_curves([run], tmp_path / "curves.png")

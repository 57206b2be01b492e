"""`report` draws what the metrics hold."""

import dataclasses
import json
import math
import shutil
import sys
import warnings
from pathlib import Path

import pytest

from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.io import manifest
from bert_pretrain.io.files import sha256_file
from bert_pretrain.report.curves import PANELS, draw_curves, figure_of, read_metrics
from bert_pretrain.report.report import normal_values, write_report

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
    assert read_metrics(run)[-1]["step"] == 50  # without the line that is being written
    assert draw_curves([run], tmp_path / "new" / "curves.png").read_bytes().startswith(PNG)
    assert "<svg" in draw_curves([run, run], tmp_path / "curves.svg").read_text()
    with pytest.raises(ConfigError, match="does not end like a picture"):
        draw_curves([run], tmp_path / "curves.txt")


def test_a_run_without_pairs_has_no_panels_of_them(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "next sentence" in draw_curves([run], tmp_path / "pairs.svg").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    lines = [{name: None if "nsp" in name else value for name, value in line.items()} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = draw_curves([run], tmp_path / "none.svg").read_text()
    assert "masked tokens" in drawn
    assert "next sentence" not in drawn


def test_panels_show_chance(run: Path) -> None:
    pytest.importorskip("matplotlib")
    statistics = {"vocab_size": 4096, "unigram_entropy": {"train": 6.0, "validation": 5.5}}
    (run / "manifest.json").write_text(json.dumps({"data": {"statistics": statistics}}))
    figure = figure_of([run], [manifest.read_record(run)], [read_metrics(run)], PANELS)
    panels = {axes.get_title(): axes for axes in figure.axes}
    for title, label, height in (
        ("masked tokens: loss", "all tokens equally likely", math.log(4096)),
        ("masked tokens: loss", "token frequencies", 5.5),
        ("next sentence: loss", "chance", math.log(2)),
        ("next sentence: accuracy", "chance", 0.5),
    ):
        (line,) = (line for line in panels[title].lines if line.get_label() == label)
        assert set(line.get_ydata()) == {height}
        low, high = panels[title].get_ylim()
        assert low < height < high


def test_runs_on_different_data_have_no_line_of_token_frequencies(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    other = shutil.copytree(run, tmp_path / "other")
    for folder, entropy in ((run, 5.5), (other, 6.5)):
        statistics = {"vocab_size": 4096, "unigram_entropy": {"validation": entropy}}
        (folder / "manifest.json").write_text(json.dumps({"data": {"statistics": statistics}}))
    assert "token frequencies" in draw_curves([run], tmp_path / "one.svg").read_text()
    drawn = draw_curves([run, other], tmp_path / "both.svg").read_text()
    assert "token frequencies" not in drawn
    assert all(label in drawn for label in ("all tokens equally likely", "run: held out", "other: held out"))


def test_nothing_is_drawn_that_holds_nothing(run: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [{"step": 10, "mlm_loss": 2.0}, {"step": 10, "validation_mlm_loss": 2.0, "validation_nsp_loss": None}]
    figure = figure_of([run], [{}], [lines], PANELS)
    (axes,) = figure.axes
    drawn = [line.get_label() for line in axes.lines if line.get_marker() != "None" or len(line.get_xdata()) > 1]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == drawn == ["training", "held out"]


@pytest.mark.parametrize("font", ["Noto Sans CJK SC", None])
def test_chinese_names_have_a_font_or_a_number(
    run: Path, tmp_path: Path, font: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = pytest.importorskip("matplotlib.font_manager").fontManager
    entries = [dataclasses.replace(manager.ttflist[0], name=font)] if font else []
    monkeypatch.setattr(manager, "ttflist", [entry for entry in manager.ttflist if "CJK" not in entry.name] + entries)
    runs = [shutil.copytree(run, tmp_path / name) for name in ("大", "小")]
    figure = figure_of(runs, [{}, {}], [read_metrics(run) for run in runs], PANELS)
    labels = [text for text in figure.axes[0].get_legend().get_texts() if "training" in text.get_text()]
    if font:
        assert [text.get_text() for text in labels] == ["大: training", "小: training"]
        assert all(font in text.get_fontfamily() for text in labels)
        return
    assert [text.get_text() for text in labels] == ["run 1: training", "run 2: training"]
    said = capsys.readouterr().out
    assert "run 2 is 小" in said
    assert "fonts-noto-cjk" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(runs, tmp_path / "curves.png")


def test_the_folder_of_all_stages_is_opened(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = tmp_path / "runs" / "auto"
    for name in ("first", "second"):
        shutil.copytree(run, runs / "train" / name)
    _, page = write_report([runs], tmp_path / "curves.png")
    assert "first" in page.read_text()
    assert "second" in page.read_text()


def test_normal_values_are_those_of_the_runs_own_recipe() -> None:
    statistics = {"vocab_size": 4096, "unigram_entropy": {"train": 6.2}, "next_sentence": "none"}
    record = {"data": {"statistics": statistics}, "config": {"train": {"mlm_bias": "zeros"}}}
    assert "8.3 nats" in dict(normal_values(record))["First loss"]
    record["config"]["train"]["mlm_bias"] = "unigram"
    found = dict(normal_values(record))
    assert "6.2 nats" in found["First loss"]
    assert "Next sentence" not in found


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


def test_the_page_holds_everything_in_one_file(run: Path, tmp_path: Path) -> None:
    lines = [{"step": 40, "skipped_steps": 3, "data_wait_share": 0.1, "tokens_per_second": 1000.0, "examples": 1280}]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(lines[0]) + "\n")
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace('{"step": 60, "ml\n', ""))
    odd = tmp_path / "a<b"
    shutil.copytree(run, odd)
    picture, page = write_report([run, odd], tmp_path / "curves.png")
    assert picture.read_bytes().startswith(PNG)
    assert page == tmp_path / "curves.html"
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text
    assert "src=" not in text.replace('src="data:', "")
    assert "a&lt;b" in text
    assert "a<b" not in text


@pytest.mark.parametrize(
    "line",
    [
        b"\xff",
        b"[]",
        b"7",
        b'{"loss": 1.0}',
        b'{"step": "1"}',
        b'{"step": 1, "loss": "a"}',
        b'{"step": 1, "loss": 1e999}',
        b'{"step": 1, "loss": [1]}',
        b'{"step": 1, "mlm_loss": NaN}',
        b"[" * 100_000,
    ],
)
def test_a_line_without_figures_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "loss": null}\n' + line + b"\n")
    with pytest.raises(DataError, match="not a line of figures") as error:
        read_metrics(tmp_path)
    assert error.value.where == f"{tmp_path / 'metrics.jsonl'}:2"


def test_figures_changed_after_the_run_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 2, "mlm_loss": 6.5}\n')
    manifest.complete(run, "run", {}, {"metrics": {"sha256": sha256_file(run / "metrics.jsonl")}})
    assert read_metrics(run)
    (run / "metrics.jsonl").write_text('{"step": 2, "mlm_loss": 6.4}\n')
    with pytest.raises(DataError, match="were changed after the run had finished"):
        read_metrics(run)
    (tmp_path / "alone").mkdir()
    shutil.copy(run / "metrics.jsonl", tmp_path / "alone")
    assert read_metrics(tmp_path / "alone")

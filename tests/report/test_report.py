"""`report`: curves, page and expected values; escaping in templates."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.io.files import checksums_of
from bert_pretrain.io.manifest import Output
from bert_pretrain.metrics import read_metrics
from bert_pretrain.report.curves import PANELS, draw_curves, make_figure, read_run, write_figure
from bert_pretrain.report.render import escaped, render
from bert_pretrain.report.report import write_report
from bert_pretrain.report.use import BETTER, MEASURED, VOCAB_SIZE, expected_use, use_of

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n\x1a\n"
METRICS = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
LINES: list[dict[str, Any]] = [
    *({"step": step, **dict.fromkeys(METRICS, 1.0 / (step + 1))} for step in range(10, 50, 10)),
    *({"step": step, **{f"validation_{name}": 0.5 for name in METRICS}} for step in (0, 40)),
    {"step": 50, **dict.fromkeys(METRICS)},  # every step of the interval was skipped
]


def write_run(folder: Path, lines: list[dict[str, Any]] = LINES, rest: str = "", **statistics: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)
    if statistics:
        (folder / "manifest.json").write_text(json.dumps({"data": {"statistics": statistics}}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rest='{"step": 60, "ml')


def drawn(runs: list[Path], path: Path) -> Path:
    write_figure(make_figure(list(map(read_run, runs)), PANELS), path)
    return path


def test_one_or_several_runs_are_drawn(run: Path, tmp_path: Path) -> None:
    assert read_metrics(run)[-1]["step"] == 50  # without the incomplete line
    assert drawn([run], tmp_path / "new" / "curves.png").read_bytes().startswith(PNG)
    assert "next sentence" in drawn([run, run], tmp_path / "curves.svg").read_text()
    with pytest.raises(ConfigError, match="image format"):
        drawn([run], tmp_path / "curves.txt")
    alone = [{name: None if "nsp" in name else value for name, value in line.items()} for line in LINES]
    text = drawn([write_run(tmp_path / "alone", alone)], tmp_path / "none.svg").read_text()
    assert "masked tokens" in text
    assert "next sentence" not in text


def test_panels_show_chance(tmp_path: Path) -> None:
    run = write_run(tmp_path, vocab_size=4096, unigram_entropy={"train": 6.0, "validation": 5.5})
    figure = make_figure([read_run(run)], PANELS)
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


def test_runs_on_different_data_have_no_line_of_token_frequencies(tmp_path: Path) -> None:
    one, other = (
        write_run(tmp_path / name, vocab_size=4096, unigram_entropy={"validation": entropy})
        for name, entropy in (("one", 5.5), ("other", 6.5))
    )
    assert "token frequencies" in drawn([one], tmp_path / "one.svg").read_text()
    text = drawn([one, other], tmp_path / "both.svg").read_text()
    labels = ("token frequencies", "all tokens equally likely", "other: held out")
    assert [label in text for label in labels] == [False, True, True]


@pytest.mark.parametrize(("bias", "first"), [("zeros", "8.3 nats"), ("unigram", "6.2 nats: token freq")])
def test_normal_values_follow_the_recipe(run: Path, tmp_path: Path, bias: str, first: str) -> None:
    statistics = {"vocab_size": 4096, "unigram_entropy": {"train": 6.2}, "next_sentence": "none"}
    record = {"data": {"statistics": statistics}, "config": {"train": {"mlm_bias": bias, "max_grad_norm": 1.0}}}
    (run / "manifest.json").write_text(json.dumps(record))
    page = write_report([run], tmp_path / "curves.png")[1].read_text()
    expected = page[page.index("What to expect") :]
    assert f"about {first}" in expected
    assert "near 6.2 nats" in expected
    assert "clipped above 1." in expected
    assert "Next sentence" not in expected


def test_runs_without_metrics_are_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no metrics yet"):
        drawn([write_run(tmp_path / "empty", [])], tmp_path / "curves.png")
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib"):
        drawn([run], tmp_path / "curves.png")


def test_curves_need_no_backend(run: Path, tmp_path: Path) -> None:
    """In a cell of a notebook, `!bert-pretrain` inherits MPLBACKEND, but may be installed elsewhere."""
    environment = {**os.environ, "MPLBACKEND": "not_installed"}
    command = [sys.executable, "-m", "bert_pretrain", "report", run, "--output", tmp_path / "curves.png"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_curves_that_cannot_be_drawn_do_not_fail_a_command(run: Path, tmp_path: Path, capsys) -> None:
    assert draw_curves([run], tmp_path / "curves.png")
    assert not draw_curves([tmp_path / "none"], tmp_path / "other.png")
    assert "no curves were drawn: " in capsys.readouterr().out


def test_page_is_one_file_and_accepts_the_output_folder_of_run(tmp_path: Path) -> None:
    more = {"step": 40, "skipped_steps": 3, "data_wait_share": 0.1, "tokens_per_second": 1000.0, "examples": 1280}
    write_run(tmp_path / "runs" / "train" / "first", [*LINES, more])
    odd = write_run(tmp_path / "a<b")
    picture, page = write_report([tmp_path / "runs", odd], tmp_path / "curves.png")
    assert picture.read_bytes().startswith(PNG)
    assert page == tmp_path / "curves.html"
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text
    assert "src=" not in text.replace('src="data:', "")
    assert "first" in text
    assert "a&lt;b" in text
    assert "a<b" not in text


LINE = b'{"step": 1, "mlm_loss": %s}'


@pytest.mark.parametrize("line", [b"\xff", b"[]", b'{"loss": 1.0}', LINE % b'"a"', LINE % b"1e999", b"[" * 100_000])
def test_invalid_line_is_reported_by_number(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "loss": null}\n' + line + b"\n")
    with pytest.raises(DataError) as error:
        read_metrics(tmp_path)
    assert error.value.where == f"{tmp_path / 'metrics.jsonl'}:2"


def test_metrics_changed_after_the_run_are_refused(run: Path, tmp_path: Path) -> None:
    Output(run, "run", {}).publish({"metrics": checksums_of(run, ["metrics.jsonl"])["metrics.jsonl"]})
    assert read_metrics(run)
    write_run(run, LINES[1:])
    with pytest.raises(DataError, match="changed"):
        read_metrics(run)
    (tmp_path / "alone").mkdir()
    shutil.copy(run / "metrics.jsonl", tmp_path / "alone")
    assert read_metrics(tmp_path / "alone")


@pytest.mark.parametrize("language", MEASURED)
def test_lower_loss_is_never_worse_and_extrapolation_is_marked(language: str) -> None:
    losses = sorted(loss for loss, _ in MEASURED[language])
    uses = [expected_use(loss, VOCAB_SIZE, language) for loss in (losses[0] - 0.5, *losses, 9.0)]
    points = [use.points for use in uses[1:-1]]
    assert points == sorted(points, reverse=True)
    assert [use.is_measured for use in uses] == [False, *[True] * len(losses), False]


def test_points_are_interpolated_from_the_last_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEASURED, "en", ((5.0, -4.0), (4.0, 4.0)))
    use, better = (expected_use(loss, VOCAB_SIZE, "en") for loss in (4.5, 4.1))
    assert (use.points, str(use)) == (0.0, "about as good as word counts")
    assert better.points >= BETTER
    assert str(better).startswith("better than word counts, by about 3 points")
    assert expected_use(4.1, VOCAB_SIZE, "fi") is None
    statistics = {"vocab_size": VOCAB_SIZE, "language": "en"}
    lines = [{"validation_mlm_loss": 9.0}, {"step": 3}, {"validation_mlm_loss": 4.5}, {"step": 5}]
    assert use_of({"data": {"statistics": statistics}}, lines) == use
    assert use_of({"data": {"statistics": statistics}}, lines[1:2]) is None
    assert use_of({"data": {"statistics": statistics}}, [*lines, {"validation_mlm_loss": None}]) is None
    assert not use_of({"data": {"statistics": {**statistics, "masked_lm_prob": 0.15}}}, lines).is_measured
    assert use_of({"data": {"statistics": {"vocab_size": VOCAB_SIZE}}}, lines) is None


EVIL = "<b>|`*_[x](y)\n# &amp;"


def test_markdown_values_are_escaped_and_unset_settings_left_out() -> None:
    metrics = {
        "task": "tag",
        "warning": "",
        "rows": {"train": 1000, "validation": 50},
        "main_metric": "f1",
        "best_epoch": 2,
        "refit_epochs": None,
        "baselines": {"words alone": 0.5},
    }
    text = render(
        "finetuned_card.md",
        metrics=metrics,
        kind="token classification",
        base=EVIL,
        settings={"epochs": 3, "dropout": 0.0, "stride": None, "regression": False, "text_field": EVIL},
        model_class="BertForTokenClassification",
        pipeline_tag="token-classification",
        splits=["validation"],
        scores=[("f1", "0.9000")],
    )
    assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: token-classification\n")
    assert f"\n---\n\n# {escaped(EVIL)}, fine-tuned for token classification\n" in text
    assert "For comparison, words alone: f1 0.5000." in text
    assert f"* `text_field`: {escaped(EVIL)}\n" in text
    assert EVIL not in text
    assert "<b>" not in text.replace(r"\<b\>", "")
    assert "* `dropout`: 0.0\n" in text
    assert "stride" not in text
    assert "| metric | validation |\n| --- | --- |\n| f1 | 0.9000 |" in text

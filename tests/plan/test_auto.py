"""`run auto` and `run --time`: a plan to repeat, a run that ends in time, the forecast and the outcome."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bert_pretrain.cli import app
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError
from bert_pretrain.pipeline import SECONDS_AFTER_TRAINING, run_pipeline
from bert_pretrain.plan import auto, timing
from tests.plan.test_planner import machine, plan

TINY = [
    "vocab.size=1500", "data.max_seq_length=32", "data.dupe_factor=1", "data.validation_fraction=0.05",
    "model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=1", "model.intermediate_size=32",
    "model.max_position_embeddings=32", "train.global_batch_size=16", "train.eval_every=50", "train.save_every=20",
    "train.device=cpu", "train.precision=fp32",
]  # fmt: skip
MADE = plan()
TOKENS = MADE.training.tokens
LOW, HIGH = MADE.training.forecast.mlm_loss
EXPECTED = sum(MADE.training.forecast.nsp_accuracy) / 2


@pytest.fixture
def fast_machine(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A machine of known speed; returns the seconds that its calibrations were allowed to take."""
    allowed: list[float] = []
    monkeypatch.setattr(timing, "measure_machine", lambda seconds, *_: (allowed.append(seconds), machine())[1])
    return allowed


def test_a_plan_is_yaml_that_says_why_and_is_made_once(
    english_text: Path, tmp_path: Path, fast_machine: list[float]
) -> None:
    inputs, seed = [str(english_text)], ["train.seed=7"]
    config = auto.planned_config(inputs, 150.0, tmp_path, settings=seed)
    text = (tmp_path / "plan.yaml").read_text()
    low, high = json.loads((tmp_path / "forecast.json").read_text())["mlm_loss"]
    assert f"{low:.2f} to {high:.2f} nats" in text
    assert (config.inputs, config.time, config.train.seed) == (tuple(inputs), 150.0, 7)
    repeated = load_config(tmp_path / "plan.yaml")
    assert repeated.model_copy(update={"train": repeated.train.model_copy(update={"seed": 7})}) == config
    keys = [line for line in text.splitlines() if line.startswith("  ")]
    assert keys
    assert all("  # " in line for line in keys)
    assert auto.planned_config(inputs, 150.0, tmp_path, settings=seed) == config
    assert fast_machine == [pytest.approx(7.5)]
    with pytest.raises(ConfigError, match="inputs"):
        auto.planned_config(["other.txt"], 150.0, tmp_path)


def test_a_plan_that_needs_less_than_the_time_ends_then(
    english_text: Path, tmp_path: Path, fast_machine: list[float]
) -> None:
    inputs, day = [str(english_text)], 86_400.0
    config = auto.planned_config(inputs, day, tmp_path)
    assert config.time is not None
    assert 120.0 <= config.time < day
    assert load_config(tmp_path / "plan.yaml").time == config.time
    assert auto.planned_config(inputs, day, tmp_path) == config
    assert auto.planned_config(inputs, 60.0, tmp_path).time == 60.0
    assert len(fast_machine) == 1


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    english_text: Path, tmp_path: Path, fast_machine: list[float]
) -> None:
    output = tmp_path / "out"
    arguments = ["run", "auto", str(english_text), "--time", "10m", "--output", str(output), "--dry-run"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "# Expected" in result.output
    assert not output.exists()


@pytest.mark.slow
def test_phases_share_what_is_left_of_the_time(english_text: Path, tmp_path: Path) -> None:
    output, seconds, before = tmp_path / "out", 60.0, 40.0
    phases = [
        {"name": "short", "data": {"max_seq_length": 16}, "train": {"max_steps": 9}, "time_share": 3.0},
        {"name": "long", "train": {"max_epochs": 7}},
    ]
    settings = [*TINY, f"phases={json.dumps(phases)}", "train.save_every=100000", "train.eval_every=100000"]
    config = load_config("tiny", settings, {"inputs": ("", [str(english_text)]), "time": ("", seconds)})

    def bodies() -> list[dict[str, Any]]:
        return [json.loads((output / "train" / name / "manifest.json").read_text()) for name in ("short", "long")]

    run_pipeline(config, output, workers=1, seconds_before=before)
    done = bodies()
    short, long = (body["config"]["train"]["time_budget"] for body in done)
    assert short > long  # which also gives the time between them
    assert short + long < seconds - before - SECONDS_AFTER_TRAINING
    assert all(body["config"]["train"][length] is None for body in done for length in ("max_epochs", "max_steps"))
    used = json.loads((output / "time.json").read_text())["used_seconds"]
    assert used > before + short + long
    run_pipeline(config, output, workers=1)  # finished: it is not trained again, though time has passed
    assert bodies() == done


def test_too_little_time_after_the_data_is_an_error(english_text: Path, tmp_path: Path) -> None:
    config = load_config("tiny", TINY, {"inputs": ("", [str(english_text)]), "time": ("", 30.0)})
    with pytest.raises(ConfigError, match="too little"):
        run_pipeline(config, tmp_path / "out", workers=1, seconds_before=29.0)


def outcome(folder: Path, loss: float, accuracy: float | None = EXPECTED, tokens: float = TOKENS, **more: Any) -> str:
    """Compare the forecast with a run that ended with these held-out figures after so many million tokens."""
    (folder / auto.FORECAST).write_text(auto.expected(MADE).model_dump_json())
    last = {"step": 9, "validation_mlm_loss": loss, "validation_nsp_accuracy": accuracy}
    (folder / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    statistics = {"next_sentence": "nsp", "unigram_entropy": {"train": 6.5}}
    record = {"data": {"statistics": statistics}, "progress": {"tokens": round(1e6 * tokens)}}
    (folder / "manifest.json").write_text(json.dumps(record))
    return auto.compare(folder, folder, **more) or ""


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"loss": (LOW + HIGH) / 2}, ""),
        ({"loss": round(HIGH, 2) + 0.004}, ""),  # printed as the end of the range
        ({"loss": 6.6}, "nothing learned"),
        ({"loss": HIGH + 0.1, "changed": ["train.peak_lr"]}, "train.peak_lr"),
        ({"loss": HIGH + 0.1, "changed": ["data.encoding"]}, "text unlike the corpora"),
        ({"loss": HIGH + 0.1, "tokens": TOKENS / 2}, "instead of"),
        ({"loss": (LOW + HIGH) / 2, "accuracy": 0.95}, "text unlike the corpora"),
        ({"loss": LOW - 0.3, "tokens": 2 * TOKENS}, "instead of"),
    ],
)
def test_an_outcome_outside_gets_its_likely_cause(figures: dict[str, Any], cause: str, tmp_path: Path) -> None:
    line = outcome(tmp_path, **figures)
    assert ("outside" in line) == ("cause" in line) == bool(cause)
    assert cause in line.partition("likely cause: ")[2]


def test_without_a_readable_forecast_or_held_out_figures_nothing_is_said(tmp_path: Path) -> None:
    assert outcome(tmp_path, LOW, None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "mlm_loss": 5.0}\n')
    assert auto.compare(tmp_path, tmp_path) is None
    (tmp_path / auto.FORECAST).write_text("{")
    assert auto.compare(tmp_path, tmp_path) is None
    (tmp_path / auto.FORECAST).unlink()
    assert auto.compare(tmp_path, tmp_path) is None

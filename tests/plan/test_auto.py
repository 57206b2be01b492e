"""`run auto` and `run --time`: a plan to repeat, a run that ends in time, the forecast and the outcome."""

import json
import types
from pathlib import Path
from typing import Any

import pytest

from bert_pretrain import pipeline
from bert_pretrain.config import Config
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError
from bert_pretrain.pipeline import SECONDS_AFTER_TRAINING
from bert_pretrain.plan import auto, timing
from bert_pretrain.plan.time_limit import TimeLimit
from tests.conftest import call, run_stages
from tests.plan.test_planner import machine, plan

TINY = [
    "vocab.size=1500", "data.max_seq_length=32", "data.dupe_factor=1", "data.validation_fraction=0.05",
    "model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=1", "model.intermediate_size=32",
    "model.max_position_embeddings=32", "train.global_batch_size=16", "train.eval_every=50", "train.save_every=20",
    "train.device=cpu", "train.precision=fp32",
]  # fmt: skip
MADE = plan()
LOW, HIGH = MADE.training.forecast.mlm_loss
EXPECTED = sum(MADE.training.forecast.nsp_accuracy) / 2


def planned(inputs: list[str], seconds: float, output: Path, settings: list[str] | None = None, **options) -> Config:
    """Return the planned configuration for inputs and a time, as `run auto` asks for it."""
    asked = load_config(None, settings or (), {"inputs": ("INPUT", inputs), "time": ("--time", seconds)})
    return auto.planned_config(asked, output, settings=settings or (), **options)


@pytest.fixture
def fast_machine(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A machine of known speed; returns the seconds that its calibrations were allowed to take."""
    allowed: list[float] = []
    monkeypatch.setattr(timing, "measure_machine", lambda seconds, *_: (allowed.append(seconds), machine())[1])
    return allowed


def test_a_plan_is_yaml_that_says_why_and_is_made_once(english_text, tmp_path, fast_machine) -> None:
    inputs, seed = [str(english_text)], ["train.seed=7"]
    config = planned(inputs, 150.0, tmp_path, seed)
    text = (tmp_path / "plan.yaml").read_text()
    low, high = json.loads((tmp_path / "forecast.json").read_text())["mlm_loss"]
    assert f"{low:.2f} to {high:.2f} nats" in text
    assert (config.inputs, config.time, config.train.seed) == (tuple(inputs), 150.0, 7)
    repeated = load_config(tmp_path / "plan.yaml")
    assert repeated.model_copy(update={"train": repeated.train.model_copy(update={"seed": 7})}) == config
    keys = [line for line in text.splitlines() if line.startswith("  ")]
    assert keys
    assert all("  # " in line for line in keys)
    assert planned(inputs, 150.0, tmp_path, seed) == config
    assert fast_machine == [pytest.approx(7.5)]
    with pytest.raises(ConfigError, match="inputs"):
        planned(["other.txt"], 150.0, tmp_path)


@pytest.mark.parametrize(("memory", "is_timed"), [(1.001, False), (2.0, True)])
def test_machine_file_replaces_timing_if_its_memory_is_within_10_percent(
    english_text: Path, tmp_path: Path, fast_machine: list[float], memory: float, is_timed: bool
) -> None:
    found = timing.device_of("cpu")
    facts = machine().model_copy(update={"cores": found.cores, "memory_bytes": int(memory * found.memory_bytes)})
    (tmp_path / "mine.json").write_text(facts.model_dump_json())
    options = {"settings": ["train.device=cpu"], "machine": str(tmp_path / "mine.json")}
    planned([str(english_text)], 150.0, tmp_path / "out", **options)
    assert bool(fast_machine) == is_timed


@pytest.mark.parametrize(
    ("card", "options", "is_timed"),
    [
        ("NVIDIA H200", {}, False),
        ("NVIDIA H200", {"machine": "h200"}, False),  # of another number of cores
        ("NVIDIA H200", {"settings": ["train.attention=padded"]}, True),
        ("NVIDIA H200", {"settings": ["train.precision=fp32"]}, True),
        ("NVIDIA H100 80GB HBM3", {}, True),
    ],
)
def test_a_card_whose_facts_are_shipped_is_not_timed_and_the_plan_says_so(
    english_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_machine: list[float],
    card: str, options: dict[str, Any], is_timed: bool,
) -> None:  # fmt: skip
    device = timing.Device("cuda", card, 3, 150_000_000_000)
    monkeypatch.setattr(timing, "device_of", lambda _: device)
    planned([str(english_text)], 150.0, tmp_path, **options)
    plan_text, facts = (tmp_path / "plan.yaml").read_text(), json.loads((tmp_path / "machine.json").read_text())
    assert bool(fast_machine) == is_timed
    assert ("shipped facts of this card" in plan_text) is not is_timed
    assert "7 of 7 networks timed" in plan_text
    if not is_timed:
        assert (facts["name"], facts["cores"]) == ("h200", 3)


def test_plan_for_a_small_text_is_shorter_than_the_given_time(english_text, tmp_path, fast_machine) -> None:
    inputs, day = [str(english_text)], 86_400.0
    config = planned(inputs, day, tmp_path)
    assert 120.0 <= config.time < day
    assert load_config(tmp_path / "plan.yaml").time == config.time
    assert planned(inputs, day, tmp_path) == config
    assert planned(inputs, 60.0, tmp_path).time == 60.0
    assert len(fast_machine) == 1


def test_too_little_time_for_a_plan_is_an_error(english_text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too short"):
        planned([str(english_text)], 60.0, tmp_path)


def test_a_dry_run_prints_the_plan_and_writes_nothing(english_text: Path, tmp_path: Path, fast_machine) -> None:
    result = call("run", "auto", english_text, "--time", "10m", "--output", tmp_path / "out", "--dry-run")
    assert "# Expected" in result.output
    assert not (tmp_path / "out").exists()
    call("run", "auto", english_text, "--time", "10m", "--output", tmp_path / "out", "--dry-run", "--steps", 9, code=2)


def test_a_dry_run_for_another_machine_does_not_print_the_existing_plan(english_text, tmp_path, fast_machine) -> None:
    planned([str(english_text)], 600.0, tmp_path)
    command = ("run", "auto", english_text, "--time", "10m", "--output", tmp_path, "--dry-run")
    assert call(*command).stdout.strip() == (tmp_path / "plan.yaml").read_text().strip()
    assert "# The machine: h100," in call(*command, "--machine", "h100").stdout


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

    run_stages(config, output, seconds_before=before)
    done = bodies()
    short, long = (body["config"]["train"]["time_budget"] for body in done)
    assert short > long  # which also gives the time between them
    assert short + long < seconds - before - SECONDS_AFTER_TRAINING
    assert all(body["config"]["train"][length] is None for body in done for length in ("max_epochs", "max_steps"))
    used = json.loads((output / "time.json").read_text())["used_seconds"]
    assert used > before + short + long
    run_stages(config, output)  # finished: it is not trained again, though time has passed
    assert bodies() == done


def test_too_little_time_after_the_data_is_an_error(english_text: Path, tmp_path: Path) -> None:
    config = load_config("tiny", TINY, {"inputs": ("", [str(english_text)]), "time": ("", 30.0)})
    with pytest.raises(ConfigError, match="too little"):
        run_stages(config, tmp_path / "out", seconds_before=29.0)


def test_run_that_finished_without_a_time_limit_is_not_trained_again(english_text: Path, tmp_path: Path) -> None:
    config = load_config("tiny", [*TINY, "train.max_steps=2"], {"inputs": ("", [str(english_text)])})
    model = run_stages(config, tmp_path / "out")
    before = (model.parent / "manifest.json").read_bytes()
    assert run_stages(config.model_copy(update={"time": 60.0}), tmp_path / "out") == model
    assert (model.parent / "manifest.json").read_bytes() == before


def test_resumed_run_has_the_time_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = {"wall_seconds": 25.0, "longest_seconds": {"evaluate": 1.0}}
    checkpoint = types.SimpleNamespace(record={"progress": progress})
    monkeypatch.setattr("bert_pretrain.train.checkpoint.newest_checkpoint", lambda _, changes: checkpoint)
    with TimeLimit(100.0, tmp_path / "time.json", used_before_open=40.0) as limit:
        stage = pipeline._with_time_left(load_config("tiny"), limit, tmp_path / "run", [1.0], is_first=True)
    # Training reserves the 5 s of the initial weights, although they are over.
    assert stage.train.time_budget == pytest.approx(20 + 5 + 60 - SECONDS_AFTER_TRAINING - 0.5, abs=0.5)


class Enough(Exception):
    """Raised instead of training; its argument is the time budget in seconds."""


def test_overwrite_resets_the_used_time(english_text: Path, tmp_path: Path, monkeypatch) -> None:
    def train(stage: Config, *_: Any, **__: Any) -> None:
        raise Enough(stage.train.time_budget)

    monkeypatch.setattr("bert_pretrain.train.run.train", train)
    config = load_config("tiny", TINY, {"inputs": ("", [str(english_text)]), "time": ("", 1000.0)})
    budgets = []
    for before, overwrite in ((500.0, False), (1.0, False), (1.0, True)):
        with pytest.raises(Enough) as caught:
            run_stages(config, tmp_path / "out", seconds_before=before, overwrite=overwrite)
        budgets += caught.value.args
    assert budgets[1] < budgets[0] < 500 < 800 < budgets[2]


@pytest.mark.parametrize(
    ("loss", "accuracy", "outside"),
    [
        ((LOW + HIGH) / 2, EXPECTED, 0),
        (round(HIGH, 2) + 0.004, EXPECTED, 0),  # printed as the end of the range
        (HIGH + 0.1, 0.95, 2),
        (LOW - 0.1, None, 1),
    ],
)
def test_compare_says_which_metrics_are_inside_the_forecast(
    loss: float, accuracy: float | None, outside: int, tmp_path: Path
) -> None:
    (tmp_path / auto.FORECAST).write_text(json.dumps(MADE.expected))
    last = {"step": 9, "validation_mlm_loss": loss, "validation_nsp_accuracy": accuracy}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    line = auto.compare(tmp_path, tmp_path) or ""
    assert (line.count("outside"), line.count("inside")) == (outside, 1 + (accuracy is not None) - outside)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "mlm_loss": 5.0}\n')
    assert auto.compare(tmp_path, tmp_path) is None
    (tmp_path / auto.FORECAST).write_text("{")
    assert auto.compare(tmp_path, tmp_path) is None
    (tmp_path / auto.FORECAST).unlink()
    assert auto.compare(tmp_path, tmp_path) is None

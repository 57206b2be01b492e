"""A run that was stopped, killed, extended or damaged goes on, bit for bit as if nothing had happened."""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError, DataError, OutputError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.train.run import train

Tiny = Callable[..., Config]

CLOCK_AND_MEMORY = {
    "elapsed_seconds",
    "examples_per_second",
    "tokens_per_second",
    "data_wait_share",
    "peak_memory_bytes",
    "time",
}

# A process of its own, to be killed: prints the exit code that the command line would leave with.
SCRIPT = """
import sys
from pathlib import Path
from bert_pretrain.config import Config
from bert_pretrain.errors import Interrupted
from bert_pretrain.train.run import train
try:
    train(Config.model_validate_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
except Interrupted as interrupted:
    print(interrupted.message)
    sys.exit(interrupted.exit_code)
"""


def metrics(run: Path, without: frozenset[str] | set[str] = frozenset()) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in without} for line in lines]


def final_tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").glob("step-????????"))[-1]
    return {**load_file(run / "model" / "model.safetensors"), **load_file(newest / "training_state.safetensors")}


def assert_same_run(left: Path, right: Path) -> None:
    ours, theirs = final_tensors(left), final_tensors(right)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert metrics(left, CLOCK_AND_MEMORY) == metrics(right, CLOCK_AND_MEMORY)


def start(config: Config, data: Path, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, config.model_dump_json(), str(data), str(output)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 180
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)


def test_a_rerun_is_bit_equal(finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path) -> None:
    train(tiny(), data_folder, tmp_path / "again")
    assert_same_run(finished, tmp_path / "again")


def test_a_killed_run_continues_bit_for_bit(tiny: Tiny, data_folder: Path, tmp_path: Path) -> None:
    config = tiny(max_steps=60, save_every=7, log_every=10, eval_every=20)
    train(config, data_folder, tmp_path / "straight")
    run = tmp_path / "killed"
    process = start(config, data_folder, run)
    wait_for(run / "checkpoints" / "step-00000014", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (run / "manifest.json").exists()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')  # as a kill in the middle of a line leaves it
    train(config, data_folder, run)
    assert_same_run(tmp_path / "straight", run)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_and_the_run_continues(
    tiny: Tiny, data_folder: Path, tmp_path: Path, number: int, exit_code: int
) -> None:
    config = tiny(max_steps=2000, save_every=1000, eval_every=1000, log_every=3)
    run = tmp_path / "run"
    process = start(config, data_folder, run)
    wait_for(run / "metrics.jsonl", process)
    deadline = time.monotonic() + 180
    while len(metrics(run)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    out, _ = process.communicate(timeout=180)
    assert process.returncode == exit_code, out
    assert "the same command continues" in out
    (checkpoint,) = (run / "checkpoints").iterdir()
    step = json.loads((checkpoint / "training_state.json").read_text())["progress"]["step"]
    assert checkpoint.name == f"step-{step:08d}"
    assert 0 < step < 2000
    shorter = tiny(max_steps=step + 3, save_every=1000, eval_every=1000, log_every=3)
    train(shorter, data_folder, run)
    straight_end = metrics(run)[-1]["step"]
    assert straight_end == step + 3


def test_sigusr1_saves_and_the_run_goes_on(tiny: Tiny, data_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(tiny(max_steps=100_000, save_every=100_000, eval_every=100_000, log_every=3), data_folder, run)
    wait_for(run / "metrics.jsonl", process)
    deadline = time.monotonic() + 180
    while len(metrics(run)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    while not (saved := list((run / "checkpoints").glob("step-*"))) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    step = int(saved[0].name[5:])
    while metrics(run)[-1]["step"] <= step + 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert metrics(run)[-1]["step"] > step + 3
    assert list((run / "checkpoints").glob("step-*")) == saved


def test_the_steps_before_a_damaged_shard_are_saved(
    tiny: Tiny, data_folder: Path, new_data_folder: Callable[..., Path], tmp_path: Path
) -> None:
    config, data, run = tiny(max_steps=24, save_every=1000, log_every=2), new_data_folder(), tmp_path / "run"
    shard = data / "train" / "00002.parquet"  # the second of the first epoch: 90 examples come before
    content = shard.read_bytes()
    shard.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    with pytest.raises(DataError, match="damaged"):
        train(config, data, run)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000005"]
    shard.write_bytes(content)
    train(config, data, run)
    train(config, data_folder, tmp_path / "straight")
    assert_same_run(tmp_path / "straight", run)


def test_a_run_is_extended_and_says_so(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    train(tiny(max_steps=16), data_folder, run)
    out = capsys.readouterr().out
    assert "extended from 12 steps to 16 steps" in out
    assert "the schedule is recomputed: 12 steps -> 16 steps" in out
    assert metrics(run)[-1]["step"] == 16
    assert json.loads((run / "manifest.json").read_text())["progress"]["step"] == 16
    with pytest.raises(ConfigError, match="would end at step 12, but it is at step 16"):
        train(tiny(), data_folder, run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(OutputError, match="has no checkpoint from which"):
        train(tiny(max_steps=20), data_folder, run)


def test_no_resume_and_overwrite(finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    with pytest.raises(OutputError, match="holds checkpoints"):
        train(tiny(max_steps=14), data_folder, run, resume=False)
    train(tiny(peak_lr=2e-3, max_steps=2), data_folder, run, overwrite=True)
    (aside,) = tmp_path.glob("run.old-*")
    assert (aside / "model" / "model.safetensors").exists()


def interrupted_copy(finished: Path, run: Path) -> Path:
    """Copy a finished run as if it had been killed just before its end."""
    shutil.copytree(finished, run)
    record = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").unlink()
    (run / "manifest.partial.json").write_text(
        json.dumps({key: record[key] for key in ("kind", "format_version", "identity")})
    )
    shutil.rmtree(run / "model")
    return run


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "settings", [{"optimizer": "lamb"}, {"optimizer": "muon"}, {"bias_correction": False}], ids=str
)
def test_every_optimizer_continues_bit_for_bit(
    tiny: Tiny, data_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = tiny(**settings)
    train(config, data_folder, tmp_path / "straight")
    run = interrupted_copy(tmp_path / "straight", tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    train(config, data_folder, run)
    assert_same_run(tmp_path / "straight", run)
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    assert losses[-1] < losses[0]
    with pytest.raises(OutputError, match=r"train\."):
        train(tiny(), data_folder, run)


def test_another_optimizers_state_is_not_carried_over(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    checkpoint = finished / "checkpoints" / "step-00000008"
    with pytest.raises(ConfigError, match="adamw, this run's is muon"):
        train(tiny(optimizer="muon"), data_folder, tmp_path / "run", init_from=checkpoint, carry_optimizer=True)


@pytest.mark.parametrize(
    "damage", ["truncated weights", "other bits", "no state", "unreadable record", "another count", "no checksums"]
)
def test_a_broken_newest_checkpoint_falls_back_loudly(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    run = interrupted_copy(finished, tmp_path / "run")
    newest = run / "checkpoints" / "step-00000012"
    if damage == "truncated weights":
        os.truncate(newest / "model.safetensors", 500)
    elif damage == "other bits":
        tensors = load_file(newest / "training_state.safetensors")
        next(tensor for name, tensor in tensors.items() if name.endswith("exp_avg")).view(-1)[0] += 1.0
        save_file(tensors, newest / "training_state.safetensors")
    elif damage == "no state":
        (newest / "training_state.safetensors").unlink()
    elif damage == "another count":
        change(newest / "training_state.json", '"examples": 192', '"examples": 193')
    elif damage == "no checksums":
        (newest / "checksums.json").unlink()
    else:
        (newest / "training_state.json").write_text("{")
    train(tiny(), data_folder, run)
    captured = capsys.readouterr()
    assert "WARNING" in captured.err
    assert "step-00000012 is broken" in captured.err
    assert "use the checkpoint before it" not in captured.err  # it is used already
    assert (run / "checkpoints" / "broken-step-00000012").is_dir()
    assert "continues from step 8" in captured.out
    assert_same_run(finished, run)


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_in_a_checkpoint_is_never_unpickled(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    run = interrupted_copy(finished, tmp_path / "run")
    for name in ("pytorch_model.bin", "optimizer.pt", "training_state.pkl"):
        (run / "checkpoints" / "step-00000012" / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), protocol=2))
    train(tiny(), data_folder, run)
    assert_same_run(finished, run)
    (tmp_path / "model").mkdir()
    shutil.copy(finished / "model" / "config.json", tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), protocol=2))
    with pytest.raises(DataError, match="was not unpickled"):
        train(tiny(), data_folder, tmp_path / "other", init_from=tmp_path / "model")
    assert not (tmp_path / "sprung").exists()


def test_init_from_takes_weights_and_carry_optimizer_takes_the_state_and_step_too(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    train(tiny(max_steps=1, peak_lr=1e-9), data_folder, tmp_path / "a", init_from=finished / "model")
    before, after = (metrics(run) for run in (finished, tmp_path / "a"))
    assert after[0]["validation_mlm_loss"] == pytest.approx(before[-1]["validation_mlm_loss"], rel=1e-6)
    checkpoint = finished / "checkpoints" / "step-00000008"
    train(tiny(), data_folder, tmp_path / "b", init_from=checkpoint, carry_optimizer=True)
    # The same data, seed and schedule from step 8 on: the very run it was taken from.
    ours, theirs = final_tensors(tmp_path / "b"), final_tensors(finished)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if not name.startswith("interval"))
    with pytest.raises(DataError, match=r"has no training_state\.json"):
        train(tiny(), data_folder, tmp_path / "c", init_from=finished / "model", carry_optimizer=True)
    with pytest.raises(ConfigError, match="the checkpoint is at step 8"):
        train(tiny(max_steps=8), data_folder, tmp_path / "d", init_from=checkpoint, carry_optimizer=True)
    with pytest.raises(ConfigError, match="no optimizer state"):
        train(tiny(), data_folder, tmp_path / "e", carry_optimizer=True)
    with pytest.raises(ConfigError, match="hidden_size is 48, that of the weights"):
        train(tiny(model={"hidden_size": 48}), data_folder, tmp_path / "f", init_from=finished / "model")


def test_embeddings_that_are_exported_smaller_resume_bit_for_bit(tiny: Tiny, data_folder: Path, tmp_path: Path) -> None:
    config, run, carried = tiny(model={"initializer_range": 0.2}), tmp_path / "run", tmp_path / "carried"
    train(config, data_folder, run)
    whole = final_tensors(run)
    embeddings = whole["bert.embeddings.word_embeddings.weight"]
    assert 0.025 < embeddings.square().mean().sqrt() <= 0.05
    checkpoint = run / "checkpoints" / "step-00000008"
    assert json.loads((checkpoint / "training_state.json").read_text())["embedding_exponent"] == 2
    train(config, data_folder, carried, init_from=checkpoint, carry_optimizer=True)
    for name in ("checkpoints/step-00000012", "model"):
        shutil.rmtree(run / name)
    train(config, data_folder, run)
    for again in (run, carried):
        ours = final_tensors(again)
        assert all(torch.equal(ours[name], whole[name]) for name in whole if not name.startswith("interval"))


def test_only_the_newest_checkpoints_stay(tiny: Tiny, data_folder: Path, tmp_path: Path) -> None:
    train(tiny(max_steps=7, save_every=2, keep_checkpoints=2), data_folder, tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000007"]


def test_a_full_disk_leaves_the_checkpoints_before_it(
    tiny: Tiny, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def write_some(tensors: Any, path: Path, **rest: Any) -> None:
        calls.append(path)
        if len(calls) > 3:  # two files a checkpoint: the second checkpoint's second file
            raise OSError(28, "No space left on device")
        save_file(tensors, path, **rest)

    monkeypatch.setattr("bert_pretrain.model.huggingface.save_file", write_some)
    run = tmp_path / "run"
    with pytest.raises(OutputError, match="No space left"):
        train(tiny(), data_folder, run)
    monkeypatch.undo()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000004"]
    train(tiny(), data_folder, run)
    assert metrics(run)[-1]["step"] == 12


def test_steps_carried_over_to_other_data_begin_with_its_first_epoch(
    finished: Path, tiny: Tiny, new_data_folder: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = finished / "checkpoints" / "step-00000008"
    other = new_data_folder("other", shard_rows=(97,))
    train(tiny(max_steps=9, log_every=1), other, tmp_path / "run", init_from=checkpoint, carry_optimizer=True)
    lines = [line for line in metrics(tmp_path / "run") if "epoch" in line]
    assert lines[0]["step"] == 9
    rows = DataFolder.open(other).rows("train")
    assert lines[0]["epoch"] == pytest.approx(tiny().train.global_batch_size / rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_five_times_ends_with_the_same_bits(
    tiny: Tiny, data_folder: Path, tmp_path: Path, seed: int
) -> None:
    # Every few steps a checkpoint, so that kills hit the writing of one too.
    config = tiny(max_steps=60, save_every=3, log_every=10, eval_every=30, keep_checkpoints=2)
    run, draw = tmp_path / "killed", random.Random(seed)
    train(config, data_folder, tmp_path / "straight")
    for _ in range(5):
        process = start(config, data_folder, run)
        deadline = time.monotonic() + 180
        while not (run / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.4))
        process.kill()
        process.communicate()
    train(config, data_folder, run)
    assert_same_run(tmp_path / "straight", run)


def test_steps_carried_over_to_another_batch_go_on_with_the_examples_that_come_next(
    finished: Path, tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    checkpoint = finished / "checkpoints" / "step-00000008"
    run = tmp_path / "run"
    before = next(line for line in reversed(metrics(finished)) if line["step"] <= 8 and "epoch" in line)
    config = tiny(max_steps=9, log_every=1, global_batch_size=32)
    train(config, data_folder, run, init_from=checkpoint, carry_optimizer=True)
    line = next(line for line in metrics(run) if "epoch" in line)
    share = before["epoch"] / before["step"]
    assert line["epoch"] == pytest.approx(8 * share + 2 * share)

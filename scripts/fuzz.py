"""A fuzzer of every reader of outside data: damaged and random inputs must be read, or refused with a `UserError`.

    python scripts/fuzz.py [--target NAME …] [--seconds 60] [--output fuzz]

Each target (`fuzz_targets.py`) runs in a process of its own. With `atheris` installed, inputs that reach new code are
kept and changed further; without it, changes of the valid inputs are tried at random. A finding is an exception other
than `UserError`, an input that takes longer than SLOW_SECONDS or MEMORY_BYTES more memory, or the death of the process.
Its input and traceback are written to `--output`, and the exit status is 1. Linux only.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

    from fuzz_targets import Target

SLOW_SECONDS = 5.0
"""Of processor time."""
HUNG_SECONDS = 120.0
"""By the clock, also on a machine with much else to do."""
MEMORY_BYTES = 512 << 20
"""Growth of the resident memory by one input; address space is limited to twice as much."""
MAX_INPUT_BYTES = 1 << 16
OUTPUTS = "outputs"
"""Folder of the small outputs that targets damage copies of; made once."""
_HEADER = struct.Struct("qq")
"""Of the memory that parent and worker share: number of inputs so far, and size of the newest, which follows."""
FORK = multiprocessing.get_context("fork")
"""The worker of each target is forked, because to import the package once a target would take longer than a target."""
LOG = "fuzz.log"
# Values that readers have stumbled over elsewhere: extremes, other types, text that is no text.
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 10**30, -(10**9), 1e308, float("nan"), float("inf"), "", "a", "\ud800",
    "\x00", "../a", "/etc/passwd", "1e999", "é" * 100, [], {}, [[]], [None], {"": None}, {"a": {"a": 1}},
)  # fmt: skip
_ODD_BYTES = (
    b"\x00",
    b"\xff",
    b"\n",
    b"\r\n",
    b'"',
    b",",
    b"\t",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b"&a",
    b"*a",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"1e999",
    b"-1",
    b"99999999999",
    b"\\ud800",
    "\u2028".encode(),
)


def main() -> int:
    arguments = parse_arguments()
    output: Path = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    print("coverage-guided by atheris" if has_atheris() else "atheris is not installed: random mutations", flush=True)
    names = prepare(output)
    total, num_findings = 0, 0
    for name in arguments.target or names:
        begin = time.time()
        inputs, seconds = watch(name, arguments.seconds, output, arguments.seed)
        found = sorted(path for path in output.glob("*.txt") if path.stat().st_mtime >= begin)
        total, num_findings = total + inputs, num_findings + len(found)
        print(f"{name:36} {inputs:9,} inputs in {seconds:4.0f} s, {len(found)} findings", flush=True)
        for path in found:
            print(f"    {path}: {path.read_text(encoding='utf-8').strip().splitlines()[-1][:150]}", flush=True)
    print(f"{total:,} inputs, {num_findings} findings")
    return int(num_findings > 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", action="append", help="one target only; may be repeated")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--output", type=Path, default=Path("fuzz"), help="folder of the findings")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def has_atheris() -> bool:
    return importlib.util.find_spec("atheris") is not None


def prepare(output: Path) -> list[str]:
    """Import the package, make the outputs that targets damage, and return the names of all targets."""
    with _silence(), scratch() as folder:
        with _instrumented() if has_atheris() else contextlib.nullcontext():
            from fuzz_targets import Outputs, targets
        if not (output / OUTPUTS).exists():
            Outputs.make(folder / "outputs")
            shutil.copytree(folder / "outputs", output / OUTPUTS)
        return list(targets(folder, Outputs(output / OUTPUTS)))


def _instrumented() -> Any:
    import atheris

    return atheris.instrument_imports(include=["bert_pretrain"])


def watch(name: str, seconds: float, output: Path, seed: int) -> tuple[int, float]:
    """Fuzz a target for some seconds, again after a hang or a death; returns the number of inputs and the seconds."""
    begin, total = time.monotonic(), 0
    shared = mmap.mmap(-1, _HEADER.size + MAX_INPUT_BYTES)
    while (left := begin + seconds - time.monotonic()) > 1:
        _HEADER.pack_into(shared, 0, 0, 0)
        with scratch() as folder:  # ours, because libFuzzer ends its process at once
            process = FORK.Process(target=work, args=(name, left, seed, folder, output, shared))
            process.start()
            reason = _reason_of_end(process, shared)
        inputs, size = _HEADER.unpack_from(shared)
        total, seed = total + inputs, seed + 1
        if reason is None:
            break
        if not inputs:
            raise RuntimeError(f"the worker of {name} {reason} before its first input: see {output / LOG}")
        _write_finding(output, name, shared[_HEADER.size : _HEADER.size + size], reason, reason)
    return total, time.monotonic() - begin


def _reason_of_end(process: "ForkProcess", shared: mmap.mmap) -> str | None:
    """Wait for a worker, and return why it ended: None for no special reason."""
    number, since = 0, time.monotonic()
    while process.is_alive():
        process.join(0.2)
        if (now := _HEADER.unpack_from(shared)[0]) != number:
            number, since = now, time.monotonic()
        elif number and time.monotonic() - since > HUNG_SECONDS:
            process.kill()
            process.join()
            return "hung"
    return None if process.exitcode == 0 else f"died with exit status {process.exitcode}"


def work(name: str, seconds: float, seed: int, folder: Path, output: Path, shared: mmap.mmap) -> None:
    """Fuzz a target in this process."""
    from fuzz_targets import Outputs, targets

    with (output / LOG).open("ab") as log:  # libFuzzer writes there, and what kills a process
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with _silence():
        target = targets(folder, Outputs(output / OUTPUTS))[name]
        try_one = Trial(name, target, output, shared)
        limit = _address_space() + 2 * MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for data in target.seeds:
            try_one(data)
        (guided if has_atheris() else at_random)(try_one, target, seconds, seed)


class Trial:
    """Reads inputs by a target, and writes what it finds."""

    def __init__(self, name: str, target: "Target", output: Path, shared: mmap.mmap) -> None:
        from bert_pretrain.errors import UserError

        self._name, self._target, self._output, self._refusal = name, target, output, UserError
        self._shared = shared
        self._number = 0
        self._seen: set[str] = set()

    def __call__(self, data: bytes) -> None:
        data = bytes(data[:MAX_INPUT_BYTES])
        self._number += 1
        self._shared[_HEADER.size : _HEADER.size + len(data)] = data
        _HEADER.pack_into(self._shared, 0, self._number, len(data))
        begin, memory = time.process_time(), _peak_memory()  # others may keep the processor busy
        try:
            self._target.read(data)
        except self._refusal:
            pass
        except Exception as error:
            self._note(data, _where(error), traceback.format_exc())
        if (seconds := time.process_time() - begin) > SLOW_SECONDS:
            self._note(data, "slow", f"took {seconds:.1f} s")
        if (growth := _peak_memory() - memory) > MEMORY_BYTES:
            self._note(data, "memory", f"took {growth >> 20:,} MiB")

    def _note(self, data: bytes, kind: str, text: str) -> None:
        if kind not in self._seen:
            self._seen.add(kind)
            _write_finding(self._output, self._name, data, kind, text)


def guided(try_one: Trial, target: "Target", seconds: float, seed: int) -> None:
    """Let atheris choose the inputs; ends the process."""
    import atheris

    def mutate(data: bytes, max_size: int, number: int) -> bytes:
        draw = random.Random(number)
        choice = draw.random()
        if choice < 0.2:
            return bytes(atheris.Mutate(data, max_size))
        # libFuzzer begins with nothing, so that the seeds must come from here.
        return mutated(draw.choice(target.seeds) if choice < 0.4 else data, draw, is_json=target.is_json)[:max_size]

    options = [f"-max_total_time={max(1, int(seconds))}", f"-max_len={MAX_INPUT_BYTES}", f"-seed={seed}"]
    atheris.Setup([sys.argv[0], *options, "-rss_limit_mb=0"], try_one, custom_mutator=mutate)
    atheris.Fuzz()


def at_random(try_one: Trial, target: "Target", seconds: float, seed: int) -> None:
    """Change the seeds at random."""
    draw, end = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < end:
        try_one(mutated(draw.choice(target.seeds), draw, is_json=target.is_json))


def mutated(data: bytes, draw: random.Random, *, is_json: bool) -> bytes:
    """Return an input with one to eight random changes: of its JSON values if it has some, or of its bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        changed = _with_other_value(data, draw) if is_json and draw.random() < 0.6 else None
        data = _with_other_bytes(data, draw) if changed is None else changed
    return data


def _with_other_value(data: bytes, draw: random.Random) -> bytes | None:
    """Change, remove or add a value of a JSON text, or of a line of it; None where there is no JSON."""
    lines = data.split(b"\n")
    number = draw.randrange(len(lines))
    whole = len(lines) > 2 and lines[0].strip() in (b"{", b"[")
    try:
        tree = [json.loads(data if whole else lines[number])]
    except (ValueError, RecursionError):
        return None
    places: list[tuple[Any, Any]] = [(tree, 0)]  # of values: what holds each, and its key there
    for holder, key in places:  # grows
        value = holder[key]
        if isinstance(value, dict | list) and len(places) < 2000:
            places += [(value, each) for each in (value if isinstance(value, dict) else range(len(value)))]
    holder, key = draw.choice(places)
    kind = draw.randrange(8)
    if kind == 0 and len(places) > 1 and holder is not tree:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[str(draw.choice(_ODD))] = holder.pop(key)
    elif kind == 2:
        other, place = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[place]))
    elif kind == 3:
        holder[key] = [holder[key]]
    else:
        holder[key] = draw.choice(_ODD)
    text = json.dumps(tree[0]).encode()
    return text if whole else b"\n".join([*lines[:number], text, *lines[number + 1 :]])


def _with_other_bytes(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randint(0, len(data))
    end = min(len(data), begin + draw.choice((0, 1, 1, 2, 8, 64)))
    kind = draw.randrange(7)
    if kind == 0 and data:  # flip a bit
        at = min(begin, len(data) - 1)
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
    if kind == 1:  # truncate
        return data[:begin]
    if kind == 2:  # repeat
        return data[:end] + data[begin:end] * draw.choice((1, 2, 100)) + data[end:]
    if kind == 3:  # copy from elsewhere
        source = draw.randint(0, len(data))
        return data[:begin] + data[source : source + end - begin] + data[end:]
    if kind == 4:  # remove
        return data[:begin] + data[end:]
    new = draw.choice(_ODD_BYTES) if kind == 5 else draw.randbytes(end - begin)
    return data[:begin] + new + data[end:]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary folder, in memory where there is one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def _where(error: Exception) -> str:
    """Return the type of an exception and the innermost line of the package that it came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "bert_pretrain" in frame.filename]
    return (
        f"{type(error).__name__} {Path(frames[-1].filename).name}:{frames[-1].lineno}"
        if frames
        else type(error).__name__
    )


def _write_finding(output: Path, name: str, data: bytes, kind: str, text: str) -> None:
    stem = f"{name.replace('/', '-')}-{hashlib.sha256(f'{name} {kind}'.encode()).hexdigest()[:8]}"
    (output / f"{stem}.input").write_bytes(data)
    (output / f"{stem}.txt").write_text(f"{name}: {kind}\n{text}\n", encoding="utf-8", errors="replace")


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())

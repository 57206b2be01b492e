"""Both data stages against an S3 server on this machine, killed in the middle: do they write what a local run writes?

Starts the S3 server of the package `moto` on loopback, uploads a corpus, and runs `vocab` and `make-data` from URLs to
URLs. Each is killed (SIGKILL) `--kills` times at random moments and started again. At the end all objects must have the
bytes of the local run, manifests apart, which contain paths. Needs `pip install "moto[server]" s3fs`.

    python scripts/check_s3.py TEXT [TEXT ...] --work OUT [--kills 10]
"""

import argparse
import hashlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BUCKET = "s3://bert-pretrain-check"
SETTINGS = ["--set", "vocab.size=4096", "--set", "data.examples_per_shard=256", "--set", "data.max_seq_length=64"]
KEYS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--work", type=Path, required=True, help="a new folder")
    parser.add_argument("--kills", type=int, default=10, help="of each command")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    rng = random.Random(options.seed)
    seconds = {}
    for name, words in commands([str(text) for text in options.texts], str(options.work / "local")).items():
        begin = time.perf_counter()
        run(words)
        seconds[name] = time.perf_counter() - begin
    filesystem = serve(options.work)
    for text in options.texts:
        filesystem.put_file(str(text), f"{BUCKET}/corpus/{text.name}")
    for name, words in commands([f"{BUCKET}/corpus/*"], BUCKET).items():
        killed = sum(run_and_kill(words, rng.uniform(0.0, 1.5 * seconds[name])) for _ in range(options.kills))
        run(words)
        print(f"{name}: killed {killed} times, then finished", flush=True)
    differing = compare(options.work / "local", filesystem)
    print("\n".join(differing) or "all objects have the bytes of the local run")
    sys.exit(bool(differing))


def commands(inputs: list[str], output: str) -> dict[str, list[str]]:
    store = str(Path(output) / "store") if "://" not in output else "s3-store"
    vocab = ["vocab", *inputs, "--output", f"{output}/vocab", *SETTINGS]
    data = ["make-data", *inputs, "--vocab", f"{output}/vocab", "--output", f"{output}/data", "--store", store]
    return {"vocab": vocab, "make-data": [*data, *SETTINGS]}


def serve(work: Path) -> Any:
    """Start the server, for as long as this process lives, and make the bucket."""
    import fsspec
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    os.environ.update(KEYS, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    os.chdir(work)
    filesystem = fsspec.filesystem("s3")
    filesystem.mkdir(BUCKET)
    return filesystem


def run(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "bert_pretrain", *words], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(words)}\n{done.stderr}")


def run_and_kill(words: list[str], seconds: float) -> bool:
    """Run a command and kill it, workers included, after so many seconds; whether it was still running."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bert_pretrain", *words], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def compare(local: Path, filesystem: Any) -> list[str]:
    """Return a line for each file that one side lacks or that differs."""
    ours = {
        path.relative_to(local).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("vocab", "data")
        for path in (local / folder).rglob("*")
        if path.is_file()
    }
    prefix = filesystem._strip_protocol(BUCKET) + "/"
    theirs = {
        path.removeprefix(prefix): hashlib.sha256(filesystem.cat_file(path)).hexdigest()
        for folder in ("vocab", "data")
        for path in filesystem.find(prefix + folder)
    }
    lines = [f"only local: {name}" for name in sorted(ours.keys() - theirs.keys())]
    lines += [f"only in the bucket: {name}" for name in sorted(theirs.keys() - ours.keys())]
    common = sorted(ours.keys() & theirs.keys())
    return lines + [f"differs: {name}" for name in common if ours[name] != theirs[name] and "manifest" not in name]


if __name__ == "__main__":
    main()

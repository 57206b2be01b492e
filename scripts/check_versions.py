"""Run the tests on the oldest or the newest versions of the dependencies that `pyproject.toml` admits.

    python scripts/check_versions.py --folder /tmp/oldest [--keep torch] oldest [tests/text -x]

Makes a fresh environment in `--folder` with this Python, installs the package with its extra `test`, and runs pytest
there: by default everything but slow and GPU tests. `oldest` takes the lowest version of each direct dependency that
all of them together admit, as `uv pip compile --resolution lowest-direct` finds it (`pip install uv`). `--keep NAME`
takes the version of `constraints.txt` instead, for a package whose oldest version has no wheel for this machine.
"""

import argparse
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUICK = ("-m", "not slow and not gpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("which", choices=("oldest", "newest"))
    parser.add_argument("--folder", type=Path, required=True, help="of the environment; must not exist")
    parser.add_argument("--keep", action="append", default=[], help="take this package's version of constraints.txt")
    parser.add_argument("tests", nargs="...", help="arguments of pytest, after all flags")
    arguments = parser.parse_args()
    kept = pins((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(), only=arguments.keep)
    found = pins(lowest_versions(kept)) if arguments.which == "oldest" else kept
    folder: Path = arguments.folder
    venv.create(folder, with_pip=True)
    file = folder / "constraints.txt"
    file.write_text("".join(f"{pin}\n" for pin in found), encoding="utf-8")
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", file, "-e", f"{ROOT}[test]"], check=True)
    subprocess.run([python, "-m", "pip", "list"], check=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python, "-m", "pytest", "-q", *(arguments.tests or QUICK)], cwd=ROOT, env=environment
    ).returncode


def lowest_versions(kept: Sequence[str]) -> list[str]:
    """Return a pin of every package, the direct dependencies at their lowest versions, on this Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = ["uv", "pip", "compile", "-q", "--resolution", "lowest-direct", "--python-version", version]
    command += ["--no-annotate", "--no-header", "--extra", "test", "-c", "-", "pyproject.toml"]
    compiled = subprocess.run(command, cwd=ROOT, check=True, text=True, input="\n".join(kept), stdout=subprocess.PIPE)
    return compiled.stdout.splitlines()


def pins(lines: Iterable[str], only: Sequence[str] | None = None) -> list[str]:
    """Return the lines `name==version`, of all packages or only of some."""
    found = [line.strip() for line in lines if re.match(r"[\w.-]+==", line.strip())]
    return found if only is None else [pin for pin in found if pin.partition("==")[0] in only]


if __name__ == "__main__":
    sys.exit(main())

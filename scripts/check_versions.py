"""Run the tests on the oldest or the newest versions of the dependencies that `pyproject.toml` admits.

    python scripts/check_versions.py --folder /tmp/oldest [--keep torch] oldest [tests/text -x]

Makes a fresh environment in `--folder` with this Python, installs the package with its extra `test`, and runs pytest
there: by default everything but slow and GPU tests. `oldest` pins each direct dependency to its lower bound; what those
depend on is chosen by pip. `--keep NAME` takes the version of `constraints.txt` instead, for a package whose oldest
version has no wheel for this machine.
"""

import argparse
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
QUICK = ("-m", "not slow and not gpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("which", choices=("oldest", "newest"))
    parser.add_argument("--folder", type=Path, required=True, help="of the environment; must not exist")
    parser.add_argument("--keep", action="append", default=[], help="take this package's version of constraints.txt")
    parser.add_argument("tests", nargs="...", help="arguments of pytest, after all flags")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    venv.create(folder, with_pip=True)
    pins = constraints((ROOT / "pyproject.toml").read_text(encoding="utf-8")) if arguments.which == "oldest" else []
    file = folder / "constraints.txt"
    file.write_text("\n".join([*without(pins, arguments.keep), *kept(arguments.keep)]) + "\n", encoding="utf-8")
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", file, "-e", f"{ROOT}[test]"], check=True)
    subprocess.run([python, "-m", "pip", "list"], check=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python, "-m", "pytest", "-q", *(arguments.tests or QUICK)], cwd=ROOT, env=environment
    ).returncode


def constraints(pyproject: str) -> list[str]:
    """Return a pin to its lower bound for each direct dependency that has one, extras included.

    Of several lower bounds, it is the highest: all extras are installed together.
    """
    project = tomllib.loads(pyproject)["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    lowest: dict[str, str] = {}
    for requirement in map(Requirement, texts):
        bounds = [each.version for each in requirement.specifier if each.operator == ">="]
        for version in bounds:
            lowest[requirement.name] = max(version, lowest.get(requirement.name, version), key=Version)
    return [f"{name}=={version}" for name, version in sorted(lowest.items())]


def without(pins: list[str], names: list[str]) -> list[str]:
    return [pin for pin in pins if pin.partition("==")[0] not in names]


def kept(names: list[str]) -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in names]


if __name__ == "__main__":
    sys.exit(main())

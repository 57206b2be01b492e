"""Processes with a pretended CUDA device, and a small data folder for them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.conftest import make_data_folder

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
TORCH = Path(torch.__file__).parent
Pretended = Callable[..., Any]


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that pretends a CUDA device."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler to make a pretended CUDA device with")
    if torch.version.cuda is not None:
        pytest.skip("this PyTorch is a build for CUDA, which brings its own hooks; the tests marked gpu are for it")
    library = tmp_path_factory.mktemp("pretended") / "libpretended_cuda.so"
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", HERE / "hooks.cpp", "-I", TORCH / "include"]
    command += ["-L", TORCH / "lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH / 'lib'}", "-o", library]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    return library


@pytest.fixture(scope="session")
def pretended(cuda_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pretended]:
    """Run a function of a module here, `module.function`, in a process with the pretended device.

    It gets strings, and what it returns is passed on as JSON.
    """
    folder = tmp_path_factory.mktemp("calls")
    # The library must be loaded before torch is imported.
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); from tests.cuda.server import serve; serve()"
    path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    server = subprocess.Popen(
        [sys.executable, "-c", code, str(cuda_library)],
        cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None

    def run(what: str, *arguments: object) -> Any:
        log, result = folder / "log", folder / "result"
        request = {"what": what, "arguments": list(map(str, arguments)), "log": str(log), "result": str(result)}
        print(json.dumps(request), file=server.stdin, flush=True)
        status = server.stdout.readline().strip()
        assert status == "0", log.read_text() if log.exists() else f"the process ended: {server.poll()}"
        return json.loads(result.read_text())

    yield run
    server.stdin.close()
    server.wait(timeout=30)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data_folder(tmp_path_factory.mktemp("data") / "data", shard_rows=(60,), validation_rows=40)

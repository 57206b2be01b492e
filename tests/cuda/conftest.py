"""Fixtures: a process with a fake CUDA device, and a small data folder."""

import multiprocessing
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.worker import call, load
from tests.train.conftest import make_data_folder

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
OnFakeCuda = Callable[..., Any]


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to build a fake CUDA device")
    if torch.version.cuda is not None:
        pytest.skip("a CUDA build of PyTorch has real hooks; use the tests marked gpu")
    library = tmp_path_factory.mktemp("fake-cuda") / "libfake_cuda.so"
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", HERE / "hooks.cpp", "-I", TORCH / "include"]
    command += ["-L", TORCH / "lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH / 'lib'}", "-o", library]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    return library


@pytest.fixture(scope="session")
def on_fake_cuda(cuda_library: Path) -> Iterator[OnFakeCuda]:
    """Call `module.function` of tests/cuda in a process with the fake CUDA device."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=load, initargs=(str(cuda_library),)) as pool:
        yield lambda name, *arguments: pool.submit(call, name, *arguments).result(timeout=600)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data_folder(tmp_path_factory.mktemp("data") / "data", shard_rows=(60,), validation_rows=40)

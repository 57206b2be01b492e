"""Processes with a pretended CUDA device, and a small data folder for them."""

import multiprocessing
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.server import call, load
from tests.train.conftest import make_data_folder

HERE = Path(__file__).parent
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
def pretended(cuda_library: Path) -> Iterator[Pretended]:
    """Call a function of a module here, `module.function`, in a process with the pretended device."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=load, initargs=(str(cuda_library),)) as pool:
        yield lambda what, *arguments: pool.submit(call, what, *arguments).result(timeout=600)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data_folder(tmp_path_factory.mktemp("data") / "data", shard_rows=(60,), validation_rows=40)

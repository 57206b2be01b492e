#!/bin/sh
# Installs this checkout with the versions of requirements.lock into the active environment. pip checks every file
# against its SHA-256, except torch's.
#
# TORCH_INDEX is where torch comes from, for example https://download.pytorch.org/whl/cpu; by default pip's own index.
# Without that of the CPU, torch on Linux needs CUDA libraries, which are not installed here.
set -eu
cd "$(dirname "$0")/.."
torch=$(grep '^torch==' constraints.txt)
python -m pip install -q --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
python -m pip install -q --no-deps --require-hashes -r requirements.lock
python -m pip install -q --no-deps --no-build-isolation -e .
python -m pip check

#!/bin/sh
# scripts/lock.sh          writes requirements.lock: the versions of constraints.txt with the SHA-256 of every file, for
#                          every platform and Python from 3.11 on. Needs uv (pip install uv).
# scripts/lock.sh install  installs this checkout with those versions into the active environment; pip checks every file.
#
# torch and the CUDA libraries it asks for are left out of the lock file: its wheels differ by platform and index.
# TORCH_INDEX is where torch comes from, for example https://download.pytorch.org/whl/cpu; by default pip's own index,
# whose torch on Linux needs CUDA libraries that are not installed here.
set -eu
cd "$(dirname "$0")/.."
if [ "${1-}" = install ]; then
    torch=$(grep '^torch==' constraints.txt)
    python -m pip install -q --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
    python -m pip install -q --no-deps --require-hashes -r requirements.lock
    python -m pip install -q --no-deps --no-build-isolation -e .
    exec python -m pip check
fi
{
    echo "# Made by scripts/lock.sh; installed by scripts/lock.sh install."
    uv pip compile -q --universal --python-version 3.11 --generate-hashes --extra test -c constraints.txt \
        --no-annotate --no-header pyproject.toml |
        awk '/^[a-z]/ { drop = /^(torch=|triton|nvidia-|cuda-)/ } !drop'
} > requirements.lock

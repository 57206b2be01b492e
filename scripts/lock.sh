#!/bin/sh
# Writes requirements.lock: the versions of constraints.txt with the SHA-256 of every file, for every platform and
# Python from 3.11 on. Needs uv (pip install uv).
#
# torch and the CUDA libraries it asks for are left out: its wheels differ by platform and index.
set -eu
cd "$(dirname "$0")/.."
{
    echo "# Made by scripts/lock.sh; installed by scripts/install_locked.sh."
    uv pip compile -q --universal --python-version 3.11 --generate-hashes --extra test -c constraints.txt \
        --no-annotate --no-header pyproject.toml |
        awk '/^[a-z]/ { drop = /^(torch=|triton|nvidia-|cuda-)/ } !drop'
} > requirements.lock

#!/usr/bin/env bash
# All that only a GPU can show, in one command that ends within its limit of nine minutes: see gpu_check.py.
#
#   scripts/gpu_check.sh [FOLDER] [--limit SECONDS] [--parts NAME …] [--corpus FILE] [--old FOLDER]
#
# Python is $PYTHON, else that of .venv, else python3; nothing is installed and no network is used. Where there is no
# git, $GPU_CHECK_COMMIT says which commit is checked.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
exec "$python" scripts/gpu_check.py "$@"

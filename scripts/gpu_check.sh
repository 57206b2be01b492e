#!/usr/bin/env bash
# Run all checks that need a GPU within nine minutes: see gpu_check.py.
#
#   scripts/gpu_check.sh [FOLDER] [--limit SECONDS] [--parts NAME …] [--corpus FILE] [--old FOLDER]
#
# Python is $PYTHON, else .venv/bin/python, else python3. Nothing is installed or downloaded. Without git, set
# $GPU_CHECK_COMMIT to the commit.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
exec "$python" scripts/gpu_check.py "$@"

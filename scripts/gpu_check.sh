#!/usr/bin/env bash
# All that only a GPU can show, in one command that ends within nine minutes: the tests marked `gpu`, then our training
# step against transformers, at lengths 128 and 512. The examples are made here from the documentation inside Python;
# the models have BERT's 30,522 tokens all the same.
#
#   scripts/gpu_check.sh [FOLDER]      what is made goes to FOLDER (default: a temporary one), results to the terminal
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
folder=${1:-$(mktemp -d)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "there is no CUDA device here; nothing was checked" >&2
    exit 2
fi

left() { echo $((SECONDS < 525 ? 530 - SECONDS : 5)); }  # 0 would mean no limit

echo "== tests marked gpu"
status=0
timeout "$(left)" "$python" -m pytest -m gpu -q --durations=5 || status=$?

echo "== examples"
mkdir -p "$folder"
[ -s "$folder/pydoc.jsonl" ] || "$python" scripts/pydoc_corpus.py "$folder/pydoc.jsonl"
timeout "$(left)" "$python" -m bert_pretrain vocab "$folder/pydoc.jsonl" --output "$folder/vocab" --vocab-size 8192
for length in 128 512; do
    timeout "$(left)" "$python" -m bert_pretrain make-data "$folder/pydoc.jsonl" --vocab "$folder/vocab" --output "$folder/data-$length" \
        --set data.max_seq_length=$length --set data.dupe_factor=5
done

bench() { # the smaller comparisons first, so that what is cut off is the largest
    timeout "$(left)" "$python" scripts/bench_train.py "$@" --dropout 0 --vocab-size 30522 || echo "(not finished: $*)"
}
echo "== BERT-Base at 128"
bench "$folder/data-128" --sizes 12x768 --examples 256 --pairs 7
echo "== BERT-Base at 512"
bench "$folder/data-512" --sizes 12x768 --examples 64 --pairs 5
echo "== BERT-Large at 512"
bench "$folder/data-512" --sizes 24x1024 --examples 32 --pairs 5
echo "took $SECONDS s"
exit "$status"

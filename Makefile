# `make demo` pretrains a tiny BERT, `make test` checks and tests the package. Both install into .venv first.
PYTHON ?= python3
BIN := .venv/bin
RUN := $(BIN)/bert-pretrain
MODEL := runs/demo/train/model
# Number of pytest processes. In `test`, each has one OpenMP thread, so that they do not compete for the cores.
JOBS ?= 2

.PHONY: demo test test-slow check clean

demo: .venv/installed data/pydoc.jsonl
	$(RUN) run demo --output runs/demo
	@echo
	$(RUN) fill-mask $(MODEL) "return a list of [MASK] ."
	$(RUN) fill-mask $(MODEL) "raise an [MASK] if the file does not exist ."
	$(RUN) fill-mask $(MODEL) "this method returns a new [MASK] object ."

test: check
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow and not gpu" -n $(JOBS) -q

test-slow: .venv/installed
	$(BIN)/pytest -m "slow and not gpu" -o faulthandler_timeout=3600 -n $(JOBS) -q

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

data/pydoc.jsonl: .venv/installed scripts/pydoc_corpus.py
	$(BIN)/python scripts/pydoc_corpus.py $@

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bert-pretrain needs Python 3.11 or newer; run make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e ".[test]"
	@touch $@

clean:
	rm -rf .venv runs data/pydoc.jsonl .pytest_cache .mypy_cache .ruff_cache

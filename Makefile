# All set-up is done by the targets: a bare machine needs Python 3.11 or later, pip and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-

.PHONY: demo test fuzz mutants shape lint clean

demo: $(STAMP)examples
	$(BIN)/tfdist run --strategy multi_worker -n 2 examples/digits.py

test: export PATH := $(CURDIR)/$(BIN):$(PATH)
test: $(STAMP)dev
	$(BIN)/tfdist build-horovod
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=10 $(PYTEST_ARGS)

# Breaks one place after the other and lists what no test notices: ARGS="-k WORD --seconds 300".
mutants: $(STAMP)dev
	$(BIN)/python -m tests.mutants $(ARGS)

# FUZZ_ARGS="--programs 20 --seed 7 --targets multi_worker,mirrored"
fuzz: $(STAMP)dev
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

# Lines, modules, hooks, types and rooms of the package, beside their aims.
shape: $(STAMP)dev
	$(BIN)/python -m tests.shape

lint: $(STAMP)dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.prose

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tfdist needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ". Set PYTHON=python3.11.")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(STAMP)%: setup.cfg pyproject.toml | $(BIN)/python
	@echo "installing tfdist[$*] (TensorFlow is about 600 MB) ..."
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache tfdist-logs

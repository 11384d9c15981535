# The commands of this repository. `make sweep` and `make test` need only Python >= 3.11 (with venv) and
# make. They create .venv and install the exact versions of constraints.txt. ARGS is passed on:
#   make sweep ARGS="--images 8 --modes ar,lantern++"      make test ARGS="tests/decoding -x"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

VENV  := .venv
BIN   := $(VENV)/bin
PLAIN := $(VENV)/.installed
DEV   := $(VENV)/.installed-dev
ARGS  ?=
# Test processes; each of them computes on one thread.
WORKERS ?= logical
# Interpreters of `make test-lowest`, and the tests that it runs.
PYTHONS ?= python3.11 python3.12 python3.13
QUICK   := $(addprefix tests/,config devices methods metrics models/checkpoints models/families prompts storage utils \
  cli/test_commands.py cli/test_environments.py)

.PHONY: help sweep test check lint test-long test-lowest $(PYTHONS) reliability predict-here compare-plain aa bench-load ray-overhead screenshots \
  constraints wheel docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

sweep: $(PLAIN) ## install, then run the default experiment (ARGS: flags of `lantern-bench sweep`)
	$(BIN)/lantern-bench sweep $(ARGS)

test: check lint ## install, then lint, types and tests (ARGS: flags of pytest)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

check: $(DEV) ## check that torchvision's compiled part runs with this torch
	@$(BIN)/python -c 'import torch, torchvision; torchvision.ops.nms(torch.tensor([[0., 0., 1., 1.]]), torch.ones(1), 0.5)' || { \
	  echo "error: torchvision.ops.nms does not run: the installed torch and torchvision do not belong together." >&2; \
	  echo "       Type 'make clean' and try again; if it stays, look at their two versions in constraints.txt." >&2; \
	  exit 1; }

lint: $(DEV) ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-long: check ## the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --timeout 3600 -m long $(ARGS)

test-lowest: $(PYTHONS) ## the lowest versions of pyproject.toml, on each Python present: doctor, a small sweep, quick tests

# In an environment apart. The constraints are the floors themselves: one that cannot be installed is an error.
$(PYTHONS): build/lowest.txt
	@"$@" -c '' 2>/dev/null || { echo "$@: not present"; exit 0; }; \
	name=build/lowest-$$("$@" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); bin=$$name/bin; set -x; \
	"$@" -m venv "$$name"; \
	$$bin/python -m pip install --disable-pip-version-check --quiet uv; \
	$$bin/uv pip install --quiet --python $$bin/python -c $< -e '.[hf]' hypothesis pytest pytest-timeout pytest-xdist; \
	$$bin/lantern-bench doctor; \
	$$bin/lantern-bench sweep --images 2 --no-resume --out "$$name/run"; \
	OMP_NUM_THREADS=1 $$bin/python -m pytest -n $(WORKERS) --dist worksteal $(QUICK) $(ARGS)

build/lowest.txt: pyproject.toml
	mkdir -p build
	sed -nE 's/^ +"([a-zA-Z0-9_-]+)>=([0-9.]+)".*/\1==\2/p' $< | sort -u > $@

reliability: check ## run the fault tests and write their outcomes to tests/faults/README.md
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.docs.reliability

predict-here: $(PLAIN) ## profile this machine, run a compiled sweep and predict its speedups (ARGS: flags of `sweep`)
	$(BIN)/lantern-bench profile --tree chain-3,small-7,eagle1-25 --images 12 --save-device build/predict/here.yaml
	rm -rf build/predict/run
	$(BIN)/lantern-bench sweep --compile --metrics speed --out build/predict/run $(ARGS) > /dev/null
	$(BIN)/lantern-bench predict build/predict/run --device build/predict/here.yaml

compare-plain: $(DEV) ## milliseconds per step: a plain implementation and this one (ARGS: --images N --cells ...)
	$(BIN)/python -m scripts.bench.plain_compare $(ARGS)

aa: $(DEV) ## pairs of identical runs: do intervals cover, is compare silent? (ARGS: --pairs N --images N --processes N ...)
	$(BIN)/python -m scripts.bench.aa $(ARGS)

bench-load: $(DEV) ## 1,000,000 records: time and memory of tables, resuming and the report (ARGS: --new --prompts N ...)
	$(BIN)/python -m scripts.bench.load $(ARGS)

ray-overhead: $(DEV) ## one Ray worker against a local run, in pairs (ARGS: --pairs N --images N)
	$(BIN)/python -m scripts.bench.ray_overhead $(ARGS)

screenshots: check ## draw the figures of the documentation from the committed runs (needs Chromium)
	$(BIN)/python -m scripts.docs.pictures

constraints: ## write the versions installed in .venv to constraints.txt
	@test -x $(BIN)/python || { echo "error: no $(VENV) to read: type 'make test' first." >&2; exit 1; }
	{ echo "# Exact versions of the whole tree. Made by 'make constraints' from .venv; not edited by hand."; \
	  $(BIN)/python -m pip freeze --all --exclude-editable --exclude pip --exclude lantern-bench \
	  | { grep -v ' @ ' || true; } | sed -E 's/\+[A-Za-z0-9.]+$$//' | LC_ALL=C sort -f; } > constraints.txt.new
	mv constraints.txt.new constraints.txt

wheel: | $(BIN)/python ## build a wheel in dist/ without installing the package
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

# In an environment apart, so that `make constraints` does not list its packages.
docs: $(BIN)/python ## build the site of docs/ into site/ and check its links
	$(BIN)/python -m venv build/docs
	build/docs/bin/python -m pip install --disable-pip-version-check --quiet 'mkdocs-material>=9.5'
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict

clean: ## remove what the other targets made, except results
	rm -rf $(VENV) dist build site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PLAIN): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e . -c constraints.txt
	touch $@

# Developing implies using: both stamps.
$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $(PLAIN) $@

# The first interpreter that runs, is new enough and can make environments. Debian splits venv off, and a version
# manager's command may exist without an interpreter behind it, so each candidate is tried, not only looked up.
$(BIN)/python:
	@old=""; for p in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
	  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  if "$$p" -c 'import ensurepip, venv' 2>/dev/null; then echo "creating $(VENV) with $$p"; exec "$$p" -m venv $(VENV); fi; \
	  old="$$old $$p"; \
	done; \
	if [ -n "$$old" ]; then \
	  echo "error: no venv module in:$$old. On Debian or Ubuntu: apt install python3-venv" >&2; \
	else \
	  echo "error: no Python >= 3.11 found (tried python3.13, python3.12, python3.11, python3)." >&2; \
	  echo "       Install one, or name it: make PYTHON=<interpreter> sweep" >&2; \
	fi; exit 1

# Everything a person needs: `make demo` and `make test` work on a fresh machine with git, make and Python 3.
# pip's own settings (PIP_INDEX_URL, PIP_CERT, SSL_CERT_FILE, …) are taken from the environment as they are.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup system lint test demo bench cluster cluster-down clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(INSTALLED)  ## make .venv with cluster-train and its development tools

# Made again when the dependencies change, and when an earlier attempt broke off.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo 'make: $(PYTHON) is too old, Python 3.10 or newer is needed: make PYTHON=python3.12 setup' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo 'make: $(PYTHON) cannot make virtual environments: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

system:  ## have sshd, a Docker engine and compose (as root on Debian they are installed)
	@$(PYTHON) docker/ensure_engine.py

lint: setup  ## ruff, mypy, and the directions of the imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy docker
	$(BIN)/lint-imports --no-logo

test: lint  ## lint, then all tests; pytest's arguments in ARGS: make test ARGS="-k name"
	@$(MAKE) --no-print-directory system || echo 'make: the tests that need what is missing here are skipped' >&2
	$(BIN)/python -m pytest $(ARGS)

demo: setup  ## train a real model with two ranks on this machine
	$(BIN)/cluster-train up inventories/local.yml

bench: setup system  ## measure launch, provisioning, following and collectives; kill 200 random processes and look what is left
	$(BIN)/python tests/bench/launch.py $(ARGS)
	$(BIN)/python tests/bench/provision.py
	$(BIN)/python tests/bench/logs.py
	$(BIN)/python tests/bench/ccl.py --inventory inventories/local.yml --ranks 2 --repeat 3
	$(BIN)/python tests/bench/ccl.py --inventory inventories/docker.yml --ranks 2 --repeat 3
	$(BIN)/python tests/bench/chaos.py

cluster: system  ## start the two containers of inventories/docker.yml
	@$(PYTHON) docker/cluster.py up

cluster-down:  ## remove them
	@$(PYTHON) docker/cluster.py down

clean:  ## remove what the targets above made in this checkout (not the containers: cluster-down)
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

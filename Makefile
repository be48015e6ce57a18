# Everything a newcomer needs; `make help` lists it.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# What also runs in a schema of another name.
CORE := tests/queue/test_claims.py tests/queue/test_finishes.py tests/queue/test_enqueue.py tests/queue/test_admin.py \
	tests/worker/test_worker.py tests/worker/test_leases.py

# A process for each core, each with a server of its own: the tests wait more than they work.
SIDE_BY_SIDE := --numprocesses auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install run test chaos check audit format schema build clean

help: ## Show what there is to do
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Create .venv and install recado with all it needs for development

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "cannot install: $(PYTHON) is not Python 3.11 or newer; set PYTHON=python3.x" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[embedded]' --group dev
	@touch $(STAMP)

run: install ## Run the example shop on an embedded PostgreSQL, under a stream of requests
	@$(BIN)/python -m examples.shop

test: install ## Run all tests on a real, embedded PostgreSQL
	@$(BIN)/python -m pytest --quiet $(SIDE_BY_SIDE)
	@RECADO_TEST_SCHEMA=another_name $(BIN)/python -m pytest --quiet $(SIDE_BY_SIDE) $(CORE)

chaos: install ## Break workers, servers and networks in full, and count: some 20 minutes
	@$(BIN)/python -m tests.chaos

check: install ## Lint, formatting, types, the import rule and the schema
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest --quiet tests/test_imports.py tests/test_schema.py

audit: install ## Look for known holes in what is installed; asks PyPI, and fails where it has no answer
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group audit
	@$(BIN)/python -m pip freeze --exclude-editable --disable-pip-version-check | \
		$(BIN)/pip-audit --strict --disable-pip --no-deps --progress-spinner off --requirement /dev/stdin

format: install ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

schema: install ## Write recado/schema.sql anew from the migrations
	@$(BIN)/python -m tests.catalog > recado/schema.sql.new && mv recado/schema.sql.new recado/schema.sql

build: install ## Build the wheel and the source distribution into dist/
	@$(BIN)/python -m build --installer pip

clean: ## Remove what was built; the data in .recado stays
	@rm -rf dist build .mypy_cache .ruff_cache

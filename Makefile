# Every target also works without make: the README spells the commands out.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: venv demo test fast lint docs format clean

venv: .venv/.tested

# A .venv that is there is used again; it is brought up to date when what it is made from changes.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e .
	touch $@

.venv/.tested: .venv/.installed
	$(BIN)/python -m pip install -c constraints.txt -e ".[test]"
	touch $@

demo: .venv/.installed
	$(BIN)/stochflow train tfbind8 --stick 0.25

# One thread a test process: the tensors are small, and two processes share two cores better than two threads do.
test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q

fast: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q -m "not slow"

lint: venv
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

# The manual, into build/site; nothing is fetched while it is built.
docs: .venv/.installed
	$(BIN)/python -m pip install -c constraints.txt -e ".[docs]"
	$(BIN)/python scripts/build_site.py

format: venv
	$(BIN)/ruff check --fix src tests
	$(BIN)/ruff format src tests

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

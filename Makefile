# Every target also works without make: the README spells the commands out.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: venv demo test fast lint format clean

venv: $(STAMP)

# A .venv that is there is used again; it is brought up to date when what it is made from changes.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test]"
	touch $@

demo: venv
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

format: venv
	$(BIN)/ruff check --fix src tests
	$(BIN)/ruff format src tests

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

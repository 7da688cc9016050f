# The front door. Every target makes .venv first if it is not there.
PYTHON ?= python3
TORCH ?= auto
VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin

.PHONY: help setup test test-all test-published test-other-processor test-pythons wheel docs lint smoke clean

help: ## Show the targets
	@grep -E '^[a-z0-9.-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: $(READY) ## Make .venv with pinned dependencies (the CPU build of torch where there is no GPU)

$(READY): pyproject.toml setup.py $(wildcard constraints*.txt) install.sh
	sh install.sh "$(PYTHON)" $(VENV) $(TORCH)
	touch $(READY)

# three files at a time: some wait more than they compute
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 10

test: $(READY) ## Run a part of every room's tests, the smallest main job among them: eight minutes
	$(PYTEST) $(shell sed 's|.*|--ignore=tests/&.py|' tests/long.txt)

test-all: $(READY) ## Run the tests
	$(PYTEST)

test-published: $(READY) ## Run the tests about the published files, which lie in MLM_DATA_DIR
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m published $(shell grep -rlwE 'published|reference' tests --include='test_*.py')

# the nearest thing to another processor that one machine can try
OTHER_PROCESSOR := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 NUMBA_CPU_NAME=generic MKL_CBWR=COMPATIBLE \
	NPY_DISABLE_CPU_FEATURES="X86_V3 X86_V4 AVX512_ICL AVX512_SPR"
BY_PROCESSOR := $(patsubst %,tests/engine/test_%.py,kernels products precision cross_entropy dropout optimizers layouts model) \
	$(patsubst %,tests/data_pipeline/test_%.py,clean_exact language_exact minhash tokenizer near_duplicates lsh samples) tests/golden/test_golden.py

test-other-processor: $(READY) ## What depends on the processor, with another machine's vector extensions
	OMP_NUM_THREADS=1 $(OTHER_PROCESSOR) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -k 'not cuda' $(BY_PROCESSOR)

test-pythons: ## Tests that need no torch, with the other Pythons that are here
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.interpreters 3.12 3.13

wheel: $(READY) ## Build the wheel, use it in an empty environment away from the clone, and run README there
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/test_wheel.py

lint: $(READY) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(VENV)/sources && ln -sfn "$(CURDIR)" $(VENV)/sources/mlm_repro # mypy follows no mapped packages
	$(BIN)/mypy

docs: $(READY) ## Build the documentation into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

smoke: $(READY) ## The whole way from text to report at the smallest size
	$(BIN)/mlm-experiment reproduce 8.3b --smoke

reproduce-355m reproduce-2.5b reproduce-8.3b: reproduce-%: $(READY) ## Reproduce a model: full size or scaled twins, as the hardware allows
	$(BIN)/mlm-experiment reproduce $*

clean: ## Remove the environment; runs/ is kept
	rm -rf $(VENV) build dist site *.egg-info

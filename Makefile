PYTHON ?= python3
# uv installs in a fraction of pip's time; pip is enough.
UV := $(shell command -v uv)
INSTALL = $(if $(UV),$(UV) pip install --quiet --python .venv,.venv/bin/python -m pip install --quiet --disable-pip-version-check)
# This house's own rules, pages and patches. A fork that changes them empties this line, and the rest is still tested.
HOUSE = tests/repo
# Two tests at a time, one file each: as much as two cores can do.
PYTEST = .venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10
TESTS = $(if $(HOUSE),,--ignore tests/repo)
# A lent machine has torch, but perhaps neither this environment nor what would build it.
GPU_PYTHON = $(if $(wildcard .venv/bin/python),.venv/bin/python,$(PYTHON))
# What such a machine lacks may be carried there as wheels of pure Python, such as jsonargparse's: they run as they are.
EMPTY :=
WHEELS = $(subst $(EMPTY) $(EMPTY),:,$(abspath $(wildcard wheels/*.whl)))
# What docs/performance.md shows but the GPU's; of a text only if one is given.
BENCHMARKS = throughput overhead scaling memory sharding startup generation growth
BENCHMARKS += $(if $(findstring --text,$(ARGS)),time_to_loss) $(if $(findstring --nanochat,$(ARGS)),peers)
LAUNCH = .venv/bin/accelerate launch --config_file accelerate_configs/cpu.yaml

.PHONY: help env train verify law trial test test-all test-gpu house bench lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: .venv/.installed ## build .venv from requirements.txt

train: .venv/.installed ## train the mini-GPT on stories with 2 CPU processes; more settings: make train ARGS="--resume never"
	$(LAUNCH) train.py --config configs/stories.yaml $(ARGS)

verify: .venv/.installed ## prove the promises on this machine; with your model: make verify ARGS="--config FILE"
	$(LAUNCH) verify.py $(ARGS)

law: .venv/.installed ## train a ladder of sizes, fit how loss falls and predict a larger run; longer: make law ARGS="--seeds 5"
	.venv/bin/python scale.py --law $(ARGS)

test: .venv/.installed-test ## lint and the tests, about 4 minutes on 2 cores
	$(PYTEST) -m "not slow" $(TESTS) $(ARGS)

test-all: .venv/.installed-test ## the long tests too
	$(PYTEST) $(TESTS) $(ARGS)

house: .venv/.installed-test ## the rules, the pages and the patches of this house alone
	$(PYTEST) -m "not slow" tests/repo $(ARGS)

trial: .venv/.installed ## put a fork through: kill, resume, verify; with its settings: make trial ARGS="--model.mlp relu2"
	.venv/bin/python -m tests.fork_trial $(ARGS)

test-gpu: ## on a machine with a GPU: its tests, then its benchmark; against a peer: make test-gpu ARGS="--nanogpt PATH"
	@PYTHONPATH=$(WHEELS) $(GPU_PYTHON) -m pytest -m cuda $(shell grep -rl mark.cuda tests --include="test_*.py"); tests=$$?; \
	PYTHONPATH=$(WHEELS) $(GPU_PYTHON) -m benchmarks gpu --budget_seconds 420 $(ARGS) && exit $$tests

bench: .venv/.installed-test ## measure speed and memory, in an hour; against a peer: make bench ARGS="--nanogpt PATH --text FILE"
	@for case in $(BENCHMARKS); do .venv/bin/python -m benchmarks $$case $(ARGS) || failed="$$failed $$case"; done; \
	test -z "$$failed" || (echo "failed:$$failed"; exit 1)

lint: .venv/.installed-test ## check style
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

clean: ## remove the environment and caches, never runs/
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path "./runs/*" -prune -exec rm -rf {} +

.venv/.installed: requirements.txt
	@echo "Building .venv from requirements.txt (once; torch is large) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 1)
	$(if $(UV),$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv,$(PYTHON) -m venv .venv)
	$(INSTALL) -r requirements.txt
	@touch $@

.venv/.installed-test: .venv/.installed requirements-test.txt
	$(INSTALL) -r requirements-test.txt
	@touch $@

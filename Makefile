PYTHON ?= python3
# uv installs in a fraction of the time that pip takes; pip is enough.
UV := $(shell command -v uv)
INSTALL = $(if $(UV),$(UV) pip install --quiet --python .venv,.venv/bin/python -m pip install --quiet --disable-pip-version-check)
# Tests of this repository's own rules, pages and patches. A fork that changes them empties this line; all other tests still run.
REPO_TESTS = tests/repo
# Three files at a time: tests often wait for processes that they start, so three keep two cores busy, and two do not.
# Where Python is told to store no compiled modules, each of the hundreds of programs that the tests start would compile them.
PYTEST = env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest \
	--numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 10
TESTS = $(if $(REPO_TESTS),,--ignore tests/repo)
# The GPU tests also run where only torch, accelerate and transformers are installed; wheels/*.whl may add packages.
GPU_PYTHON = $(if $(wildcard .venv/bin/python),.venv/bin/python,$(PYTHON))
TEST_GPU = $(GPU_PYTHON) -m pytest -m cuda -rfE $(shell grep -rl mark.cuda tests --include 'test_*.py')
LAUNCH = .venv/bin/accelerate launch --config_file accelerate_configs/cpu.yaml

.PHONY: help env test-env train verify test test-all test-core test-gpu lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## build .venv from requirements.txt
	$(call install,requirements.txt)

test-env: env ## add the tools of the tests to .venv
	$(call install,requirements-test.txt)

train verify: SHELL = bash -o pipefail
train: env ## train the mini-GPT on stories with 2 CPU processes; with other settings: make train ARGS="--resume never"
	$(call launch,train.py --config configs/stories.yaml $(ARGS))

verify: env ## check the guarantees on this machine; of your model: make verify ARGS="--config FILE"
	$(call launch,verify.py $(ARGS))

test: test-env ## run the tests: 4 minutes on 2 current cores, up to 10 on old ones
	$(PYTEST) -m "not slow" $(TESTS) $(ARGS)

test-all: test-env ## run the slow tests too
	$(PYTEST) $(TESTS) $(ARGS)

test-core: test-env ## run the quick tests without those of tools/, examples/ and this repository's rules
	$(PYTEST) -m "not slow" --ignore tests/tools --ignore tests/repo --ignore tests/test_examples.py $(ARGS)

test-gpu: export PYTHONPATH := $(abspath runs/wheels):$(PYTHONPATH)
test-gpu: ## on a machine with a GPU: test and measure for 15 minutes; again for the rest; ARGS="--nanogpt PATH"
	@for wheel in $(wildcard wheels/*.whl); do $(GPU_PYTHON) -m zipfile -e $$wheel runs/wheels; done
	@$(TEST_GPU)

lint: test-env ## check style and types
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/pyright

clean: ## remove the environment and caches, never runs/
	rm -rf .venv .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path "./runs/*" -prune -exec rm -rf {} +

-include tools/targets.mk

# Launch a script, and drop from its stderr the log and the traceback that the launcher adds below the script's message when
# the script fails or Ctrl-C stops it. The exit code of a process that was killed by a signal is kept. A loop of bash, because
# some awks print nothing until 4 kB have arrived.
define launch
$(info $(LAUNCH) $(1))
	@{ $(LAUNCH) $(1) 2>&1 >&3 | { trap "" INT; before=; while IFS= read -r line; do \
	case $$before$$line in \
	"Traceback (most recent call last):") before=$$line; continue ;; \
	"Traceback (most recent call last):  File "*"/accelerate\", line "*) cat > /dev/null ;; \
	E[0-9]*torch/distributed/elastic*"exitcode: -"*) echo "$$line"; cat > /dev/null ;; \
	E[0-9]*torch/distributed/elastic*) cat > /dev/null ;; \
	W[0-9]*torch/distributed/elastic*) ;; \
	*) test -z "$$before" || echo "$$before"; printf "%s\n" "$$line" ;; \
	esac; before=; done; } >&2; } 3>&1
endef

# Install what .venv lacks of a requirements file, and build .venv if there is none. A linked .venv belongs to another checkout.
define install
@.venv/bin/python .ci/installed.py $(1) > /dev/null 2>&1 || { \
	if test -L .venv; then echo "make: .venv is a link to $$(readlink .venv), which lacks $$(.venv/bin/python .ci/installed.py $(1) 2>&1); run make there, or remove the link"; exit 1; fi; \
	echo "Installing $(1) into .venv (torch is large) ..."; \
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { echo "Python 3.11 to 3.14 is needed: make PYTHON=python3.11 ..."; exit 1; }; \
	test -x .venv/bin/python || $(if $(UV),$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv,$(PYTHON) -m venv .venv) || exit 1; \
	$(INSTALL) -r $(1); }
endef

# Targets that need tools/ or tests/repo. The Makefile includes this file, which the copies of `make core` do not have.

# The cases that docs/performance.md shows. `curve`, which needs a corpus, is measured alone.
BENCHMARKS = throughput time_to_loss overhead memory exactness checkpoint_stall startup generation
# `make test-gpu` runs this instead of the tests alone: the tests, then measurements.
TEST_GPU = $(GPU_PYTHON) -m tools.gpu_check one $(ARGS)

.PHONY: law record trial core test-repo test-gpus bench

test-gpus: ## on a machine with several GPUs: NCCL, equal results, resume and speed, in ten minutes, as one file to send us
	@$(GPU_PYTHON) -m tools.gpu_check several $(ARGS)

law: env ## train a ladder of model sizes, fit a scaling law and predict a larger run; longer: make law ARGS="--seeds 5"
	.venv/bin/python -m tools.scale --law $(ARGS)

record: env ## train a record of docs/track.md again and compare its bits: make record NAME=stories
	.venv/bin/python -m tools.record $(NAME) $(ARGS)

trial: env ## kill, resume and verify a fork; with its settings: make trial ARGS="--model.mlp relu2"
	.venv/bin/python -m tools.trial $(ARGS)

core: ## copy the trainer without tools, benchmarks and examples into a new folder: make core OUT=DIR
	@$(PYTHON) -m tools.core "$(OUT)"

test-repo: test-env ## run the tests of this repository's rules, pages and patches alone
	$(PYTEST) -m "not slow" tests/repo $(ARGS)

bench: test-env ## measure speed and memory, in an hour; with nanoGPT: make bench ARGS="--nanogpt PATH --text FILE"
	@.venv/bin/python -m tools.benchmark $(BENCHMARKS) $(ARGS)

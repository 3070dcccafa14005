# Two commands do everything on a fresh machine with Python 3.11 to 3.13:
#   make quickstart     trains a tiny model by SFT, a reward model, and PPO with both
#   make test           runs the tests
# Both install what they need into .venv first. A GPU is used where there is one.
# Another Python: make test PYTHON=python3.12.  No GPU although there is one: make test DEVICE=cpu.
# The newest vLLM for a GPU instead of the one that the tests run with: make install DEVICE=gpu-next.

PYTHON ?= python3
BIN := .venv/bin
# Models as small as those of quickstart and tests are fastest on one thread; your own value wins.
OMP_NUM_THREADS ?= 1
# Three processes run the tests, also on two cores, because many tests wait; PARALLEL= runs them in one.
PARALLEL ?= --numprocesses 3
export PYTHON DEVICE OMP_NUM_THREADS

.PHONY: help install quickstart test test-core test-all test-v2 test-gpu docs proofs mutants benchmark benchmark-learning lint release lock clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

install:  ## make .venv and install everything into it (the other commands do this by themselves)
	@constraints/install.sh

quickstart: install  ## a supervised model, a reward model, then PPO: minutes on a laptop
	$(BIN)/lightning-rlhf fit --config configs/quickstart/sft.yaml
	$(BIN)/lightning-rlhf fit --config configs/quickstart/reward.yaml
	$(BIN)/lightning-rlhf fit --config configs/quickstart/ppo.yaml

test: install  ## the tests that are quick and need no GPU; ARGS="-k ppo -x" goes to pytest
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PARALLEL) $(ARGS)

# Of the core's quick tests those of its rooms: neither the command line nor several processes, users' files, pages.
CORE_TESTS = $(addprefix tests/,batching callbacks calls data environments functional models modules objectives \
	processes rewards rollout strategies)

test-core: install  ## the quick tests of the core's rooms, without those that start vLLM, in five minutes
	$(BIN)/python -m pytest -m "not slow and not gpu and not vllm" $(CORE_TESTS) $(PARALLEL) $(ARGS)

test-all: install .triton  ## all tests that need no GPU, properties with more examples
	PROPERTY_EXAMPLES=$${PROPERTY_EXAMPLES:-100} $(BIN)/python -m pytest -m "not gpu" $(PARALLEL) $(ARGS)
	$(TEST_ASYNC)

# Triton's interpreter runs vLLM's kernels for GPUs on a CPU. Beside the other packages, vLLM would believe in a GPU.
.triton: constraints/gpu.lock | install
	rm -rf .triton .triton.new
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-compile --target .triton.new \
		"$$(sed -n 's/^\(triton==[^ ]*\).*/\1/p' $<)"
	mv .triton.new .triton && touch .triton

TEST_ASYNC = VLLM_PROGRAM=async PYTHONPATH=tests/gpu_program/hook \
	$(BIN)/python -m pytest -m "vllm and not gpu" tests/rollout $(ARGS)

test-v2: .triton  ## the engine's tests with the program that vLLM runs on a GPU, in half an hour
	$(TEST_ASYNC)
	$(BIN)/python -m pytest tests/gpu_program $(ARGS)

test-gpu: install  ## doctor --try, then, even if it finds faults, the tests that need an NVIDIA GPU
	@$(BIN)/lightning-rlhf doctor --try || faults=1; \
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS) || faults=1; \
	exit $${faults:-0}

docs: install  ## the documentation site in site/, whose pages open from disk
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo 'the site is in site/: open site/index.html'

proofs: install  ## check every promise of the README in half an hour, which writes docs/proofs.md; PROOFS=all for hours
	$(BIN)/python -m tests.proofs $(if $(filter all,$(PROOFS)),--all) $(ARGS)

mutants: install  ## change the mathematics one operator at a time; ARGS="--every 10" tries a tenth
	$(BIN)/python -m tests.mutants $(ARGS)

benchmark: install  ## compare with TRL, which takes about an hour and writes docs/performance.md
	$(BIN)/python -m benchmarks.compare --write docs/performance.md $(ARGS)

benchmark-learning: install  ## time to a better model compared with TRL, in hours, which writes docs/time_to_accuracy.md
	$(BIN)/python -m benchmarks.learning --write docs/time_to_accuracy.md --save benchmarks/learning/results.json $(ARGS)

lint: install  ## style, types, spelling, and the workflows of GitHub
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/uvx --quiet check-jsonschema@0.14.3 --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/uvx --quiet zizmor@1.32.0 --quiet --offline --config .github/zizmor.yml .github/workflows

release: install  ## wheel and source distribution in dist/, checked: the quickstart's first run works from the wheel
	rm -rf dist build
	$(BIN)/python -m build --no-isolation
	constraints/check_release.sh dist

lock: install  ## make the version locks under constraints/ anew from setup.cfg
	constraints/lock.sh

clean:  ## remove .venv and what tools left behind; your runs/ stay
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find callbacks examples lightning_rlhf tests -name __pycache__ -type d -exec rm -rf {} +

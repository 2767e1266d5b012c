# `make train` and `make test` set up all they need: a virtual environment with exactly the versions of
# constraints.txt. The second time they start at once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup train train-gpu test test-long test-integrations test-gpu test-gpu-small quick counterexamples test-docs test-triton36 check format clean

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "wlb_titan needs Python 3.11 or newer; call make PYTHON=/path/to/python3.11")'
	@echo "Setting up $(VENV): a few minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet uv
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: $(READY)

# A small Llama on the Python files of this machine, on two pipeline stages: it trains on documents in slices, and
# then three policies take turns, a step each, on one model. 2 processes, or 4 with two replicas where there are
# four cores. OPTIONS are keys of the configuration for both, such as OPTIONS='--training.seq_len 2048'.
REPLICAS := $(shell test "$$(getconf _NPROCESSORS_ONLN)" -ge 4 && echo --parallelism.data_parallel_shard_degree 2)
SLICES := train_configs/cpu_pipeline_slices.toml
train: export PATH := $(CURDIR)/$(BIN):$(PATH)
train: $(READY)
	@echo "1 of 4: a corpus of this machine's Python files"
	wlb-titan prepare outputs/corpus --max-tokens 4000000
	@echo "2 of 4: training on documents in slices"
	wlb-titan train $(SLICES) $(REPLICAS) $(OPTIONS)
	@echo "3 of 4: plain packing and slices in turns"
	wlb-titan bench $(SLICES) --policies plain,slim/hybrid --rounds 12 --dump_folder outputs/bench $(REPLICAS) \
	    $(OPTIONS)
	@echo "4 of 4: the page"
	wlb-titan compare outputs/cpu_pipeline_slices outputs/bench --report outputs/compare

# The same on this machine's GPUs, in bfloat16 and with a larger model: on 1, 2, 4 or 8 of them.
CP := --parallelism.context_parallel_degree 2
PP := --parallelism.pipeline_parallel_degree 2
train-gpu: export PATH := $(CURDIR)/$(BIN):$(PATH)
train-gpu: $(READY)
	@case $$(python -c 'import torch; print(torch.cuda.device_count())') in \
	0) echo "error: torch finds no GPU on this machine. \`make train\` trains on its CPU." >&2; exit 2 ;; \
	1) ;; \
	2|3) echo $(CP) ;; \
	4|5|6|7) echo $(CP) $(PP) ;; \
	*) echo $(CP) $(PP) --parallelism.data_parallel_shard_degree 2 ;; \
	esac > $(VENV)/.degrees
	@echo "1 of 4: a corpus of this machine's Python files"
	wlb-titan prepare outputs/corpus --max-tokens 4000000
	@echo "2 of 4: training on micro-batches of equal work"
	wlb-titan train train_configs/gpu_debug.toml --wlb.policy wlb_lazy/hybrid/best \
	    --dump_folder outputs/gpu_balanced $$(cat $(VENV)/.degrees) $(OPTIONS)
	@echo "3 of 4: plain packing, micro-batches of equal work, and slices in turns"
	wlb-titan bench train_configs/gpu_debug.toml --policies plain,wlb_lazy/hybrid/best,slim/hybrid \
	    --dump_folder outputs/bench_gpu $$(cat $(VENV)/.degrees) $(OPTIONS)
	@echo "4 of 4: the page"
	wlb-titan compare outputs/gpu_balanced outputs/bench_gpu --report outputs/compare_gpu

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Three files at a time, those with jobs of several processes first: where such a job waits, the others go on.
TESTS := -rs -n 3 --dist loadfile --no-loadscope-reorder tests/distributed tests/drills tests/kernels tests/unit
test: $(READY)
	$(BIN)/pytest -m "not long" $(TESTS)

# The rest: more layouts, schedules and drills of the same kinds.
test-long: $(READY)
	$(BIN)/pytest -m long $(TESTS)

# What only a GPU can show, what is worth most first; CONTRIBUTING.md. `make test` runs on the CPU everywhere. OUT is
# the folder of the results; BARE=1 takes the python3 at hand, with torch, Triton and numpy, and sets nothing up.
OF_GPU := $(if $(BARE),$(PYTHON),$(BIN)/python) benchmarks/by_value.py $(if $(OUT),--out $(OUT))
test-gpu: $(if $(BARE),,$(READY))
	$(OF_GPU) $(PARTS)

# The same parts in small and on the CPU: whether their code runs at all. Once more by Triton's interpreter.
test-gpu-small: $(READY)
	$(BIN)/python benchmarks/by_value.py --small --out $(or $(OUT),outputs/by_value) \
	    $(or $(PARTS),trial times experts float8 groups overlap)
	$(BIN)/pytest -n 2 --dist loadfile --device cpu tests/gpu -k "not experts"
	TRITON_INTERPRET=1 $(BIN)/pytest -n 2 --device cpu tests/gpu/test_kernels.py

# For the developer's loop, in a minute: it leaves out what is marked slow.
quick: $(READY)
	$(BIN)/ruff check .
	$(BIN)/pytest -n 2 --quick tests/unit

# The properties again, on other examples than `make test` takes, and on more; and 300 random layouts: an hour.
counterexamples: $(READY)
	$(BIN)/pytest -n 2 -m hypothesis --hypothesis-profile others --timeout 3600 tests/unit tests/kernels
	TRITON_INTERPRET=1 $(BIN)/pytest -m hypothesis --hypothesis-profile others --timeout 3600 tests/kernels/interpreted.py
	$(BIN)/pytest -n 2 --layouts 12:312 tests/distributed/test_random_layouts.py

# Every command of README.md and docs/, on tiny data, and the steps of the Dockerfile.
test-docs: $(READY)
	$(BIN)/pytest -n 2 tests/docs

# The kernels once more under an older Triton, which GPU machines have with torch 2.11.
TRITON36 := $(VENV)/triton-3.6
$(TRITON36)/.ready: $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(TRITON36) "triton==3.6.0" "numpy<2.4"
	@touch $@

test-triton36: $(TRITON36)/.ready
	PYTHONPATH=$(TRITON36) $(BIN)/pytest -n 2 tests/kernels/test_compile.py tests/kernels/test_interpreter.py

# The examples for other trainers, with the real ones: a minute, after an installation of 240 MB.
PEERS := $(VENV)/peers
$(PEERS)/.ready: tests/integrations/requirements.txt $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(PEERS) --no-deps --requirement $<
	@touch $@

test-integrations: $(PEERS)/.ready
	PYTHONPATH=$(CURDIR)/$(PEERS) $(BIN)/pytest -s tests/integrations

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache

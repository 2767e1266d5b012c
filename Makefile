# `make train` and `make test` set up all they need: a virtual environment with exactly the versions of
# constraints.txt. The second time they start at once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: train test test-triton36 check format clean

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "wlb_titan needs Python 3.11 or newer; call make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	@touch $@

# A small Llama on the Python files of this machine: pipeline x context parallelism on 4 processes.
train: $(READY)
	$(BIN)/wlb-titan prepare outputs/corpus --max-tokens 4000000
	PATH="$(CURDIR)/$(BIN):$$PATH" torchx run wlb.train --config train_configs/cpu_debug.toml

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(READY)
	$(BIN)/pytest -n 2 tests/unit tests/kernels
	$(BIN)/pytest tests/distributed  # several processes each: one at a time
	$(BIN)/pytest tests/drills       # jobs that are killed, stopped, starved and misconfigured

# The kernels once more under an older Triton, which GPU machines have with torch 2.11.
TRITON36 := $(VENV)/triton-3.6
$(TRITON36)/.ready: $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target $(TRITON36) "triton==3.6.0" "numpy<2.4"
	@touch $@

test-triton36: $(TRITON36)/.ready
	PYTHONPATH=$(TRITON36) $(BIN)/pytest -n 2 tests/kernels/test_compile.py tests/kernels/test_interpreter.py

clean:
	rm -rf $(VENV) outputs

PYTHON ?= python3
PIP = .venv/bin/pip install -q --disable-pip-version-check -c constraints.txt

# Ragged shapes, packed sequences, pools of states, drafts and convolutions: what could read or write out of bounds.
MEMCHECKED_STEPS = test_more_slots or test_drafted_tokens_of or (int32 and (test_packed_steps or test_a_pool_of_states))
MEMCHECKED = (cuda-fla and (test_ragged or $(MEMCHECKED_STEPS))) or (test_layer_kernels and bfloat16)

# Asking the driver whether it has a function is no error. racecheck does not follow mbarriers: its report is to be read (docs/gpu.md).
SANITIZE = compute-sanitizer --report-api-errors no --kernel-regex kns=kda_ --tool

.PHONY: demo test lint test-gpu memcheck sanitize bench-cpu bench-swap bench-gpu test-transformers clean

demo: .venv/demo
	.venv/bin/python examples/train_tiny_lm.py --output runs/demo

test: lint
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist worksteal

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench-cpu: .venv/dev
	.venv/bin/python -m benchmarks.cpu

bench-swap: .venv/dev
	.venv/bin/python -m benchmarks.swap

bench-gpu: .venv/gpu
	.venv/bin/python -m benchmarks.gpu

test-gpu: .venv/gpu
	KDA_LAYERS_REQUIRE=sm90,fla,eager,triton .venv/bin/python -m pytest -n 8 tests/kernels tests/modeling

memcheck: .venv/gpu
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
		.venv/bin/python -m pytest tests/kernels -k "$(MEMCHECKED)"

sanitize: .venv/gpu
	.venv/bin/python -m tools.sanitize_kernels
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZE) memcheck --error-exitcode 9 .venv/bin/python -m tools.sanitize_kernels
	$(SANITIZE) racecheck .venv/bin/python -m tools.sanitize_kernels

test-transformers: .venv/dev
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 tools/transformers_suite

.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e ".[plot]"
	touch $@

.venv/gpu: .venv/dev
	$(PIP) -e ".[dev,gpu]"
	touch $@

.venv/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

PYTHON ?= python3
PIP = .venv/bin/pip install -q --disable-pip-version-check -c constraints.txt
WORKERS ?= 8
TESTS ?= tests/kernels tests/modeling tests/test_engine_layers.py tests/test_engine_recover.py
FAILURES ?= runs/test_gpu_failures.txt

# VENV=/opt/x runs a target with that environment's Python as it is; nothing is installed.
ifeq ($(origin VENV), undefined)
VENV = .venv
DEMO = .venv/demo
DEV = .venv/dev
GPU = .venv/gpu
DOCS = .venv/docs
endif
RUN = $(VENV)/bin/python
CUDA_SOURCES = $(wildcard kda_layers/kernels/cuda/*.cuh kda_layers/kernels/*/cuda/*/*.cu* tests/kernels/*.cu)

# On Linux, PyPI's torch brings CUDA libraries of gigabytes. Without an NVIDIA GPU, install the CPU build of PyTorch's own
# index or of a folder in pip's find-links. "+cpu" is part of the version, so PyPI's build never takes its place.
TORCH = $(shell sed -n 's/^torch==//p' constraints.txt)+cpu
CPU_WHEELS = https://download.pytorch.org/whl/cpu
WANTS_CPU_BUILD = [ "$$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1 && ! [ -e /proc/driver/nvidia ]
CPU_PIP = .venv/bin/pip install -q --disable-pip-version-check --no-deps --retries 1 --timeout 20

# Ragged shapes, packed sequences, pools of states, drafts and convolutions: what could read or write out of bounds.
MEMCHECKED_STEPS = test_more_slots or test_drafted_tokens_of or (int32 and (test_packed_steps or test_a_pool_of_states))
MEMCHECKED = (cuda-fla and (test_ragged or $(MEMCHECKED_STEPS))) or (test_layer_kernels and bfloat16)
MEMCHECK = compute-sanitizer --tool memcheck --error-exitcode 9

# Asking the driver whether it has a function is no error. racecheck does not follow mbarriers: its report is to be read (docs/internals/studies/2026-11-22-test-runs.md).
SANITIZE = compute-sanitizer --report-api-errors no --kernel-regex kns=kda_ --tool

CASE ?= 1,8192,32

.PHONY: profile demo quick test test-models test-all test-oldest lint test-gpu memcheck sanitize bench-cpu bench-swap bench-gpu test-transformers docs kernel clean

demo: $(DEMO)
	$(RUN) examples/train_lm.py --output runs/demo

PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal

# The oldest transformers that works, in a folder before the environment's own, with what it needs in another version.
OLDEST = transformers==5.17.0 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 certifi==2026.10.19.post1

# Marks: see pyproject.toml. Operators and layers; the matrix of cases and whole models are left to `make test`.
NOT_QUICK = captured_decoding captured_step continuous_batching hard_inputs hub loss matrix models recompute residual \
	swap_stock tokenizer trainer variants
quick: $(DEV)
	$(VENV)/bin/ruff check .
	$(PYTEST) -m "not (slow or compiles or emulated or combination)" $(NOT_QUICK:%=--ignore-glob='*/test_%.py') \
		--ignore tests/kernels/attention tests/kernels tests/modeling

test: lint
	$(PYTEST) -m "not (slow or emulated or combination)"

# Slow tests of models, examples and what is installed; those of kernels are left to `make test-all`.
test-models: $(DEV)
	$(PYTEST) -m "slow and not (emulated or combination)" --ignore tests/kernels --ignore tests/cuda_emulator tests

test-all: lint $(DOCS)
	$(PYTEST) -m "not combination"

# Models with the oldest transformers; `make test-models` and `make test-all` run them, and further ones, with the newest.
test-oldest: $(DEV) .venv/oldest
	PYTHONPATH=$(CURDIR)/.venv/oldest $(PYTEST) -m "not (slow or combination)" tests/modeling

lint: $(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CUDA_SOURCES)

bench-cpu: $(DEV)
	$(RUN) -m benchmarks.cpu

bench-swap: $(DEV)
	$(RUN) -m benchmarks.swap

bench-gpu: $(GPU)
	$(RUN) -m benchmarks.gpu

# Leaves to `make test-all`: files that use no GPU, combinations of tests that are slow or compile (of `fla`, for up to
# 30 s), and combinations and slow tests of `eager`. Failures are in $(FAILURES) as they come.
CPU_ONLY = test_build test_cache test_config_names test_context_parallel test_cuda_compile test_doge test_export test_heads \
	test_hub test_imports test_loading test_loss test_merged_weights test_model test_models test_over_ranks test_precision \
	test_refusals test_seams test_tensor_parallel test_tokenizer test_trainer test_variants test_weights
test-gpu: $(GPU)
	mkdir -p runs
	rm -f $(FAILURES)
	OMP_NUM_THREADS=1 KDA_LAYERS_REQUIRE=sm90,fla,eager,triton KDA_LAYERS_FAILURES=$(FAILURES) \
		$(RUN) -m pytest -n $(WORKERS) --dist worksteal -k "not without_a_gpu" \
		-m "not (emulated or combination and (compiles or fallback or slow) or slow and fallback)" \
		$(CPU_ONLY:%=--ignore-glob='*/%.py') $(TESTS)

# One forward and backward under ncu with line information; look at it with ncu-ui.
profile: $(GPU)
	mkdir -p runs
	ncu --clock-control none --set full --import-source yes --kernel-name regex:kda_ --launch-skip 3 \
		--force-overwrite -o runs/profile_$(CASE) $(RUN) -m tools.profile_case $(CASE)

memcheck: $(GPU)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(MEMCHECK) $(RUN) -m pytest --durations 5 tests/kernels -k "$(MEMCHECKED)"

sanitize: $(GPU)
	$(RUN) -m tools.sanitize_kernels
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZE) memcheck --error-exitcode 9 $(RUN) -m tools.sanitize_kernels
	$(SANITIZE) racecheck $(RUN) -m tools.sanitize_kernels

# Generated tables and figures, then the site in build/site. mkdocs-material prints an advertisement unless told not to.
docs: $(DOCS)
	OMP_NUM_THREADS=1 $(RUN) -m tools.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# The Hugging Face kernel of build/torch-{cpu,cuda}, for the `kernels` library.
kernel: $(DEV)
	$(RUN) -m tools.kernel_package

test-transformers: $(DEV)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 tools/transformers_suite

.venv/torch: constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "expected Python, got no $(PYTHON); choose another with PYTHON=" >&2; exit 1; }
	@$(PYTHON) tools/check_python.py
	$(PYTHON) -m venv .venv
	@if $(WANTS_CPU_BUILD); then echo "no NVIDIA GPU: installing torch $(TORCH)"; \
	$(CPU_PIP) --extra-index-url $(CPU_WHEELS) torch==$(TORCH) || { \
	echo "expected torch $(TORCH) for $$($(PYTHON) -V) at $(CPU_WHEELS) or in pip's find-links; choose another Python" \
	"with PYTHON=, or an environment that has torch with VENV=" >&2; exit 1; }; fi
	touch $@

.venv/demo: .venv/torch pyproject.toml
	$(PIP) -e ".[plot]"
	touch $@

.venv/gpu: .venv/dev
	$(PIP) -e ".[dev,gpu]"
	touch $@

.venv/docs: .venv/dev
	$(PIP) -e ".[dev,docs]"
	touch $@

.venv/dev: .venv/torch pyproject.toml
	$(PIP) -e ".[dev]"
	touch $@

.venv/oldest: Makefile | .venv/dev
	rm -rf $@
	.venv/bin/pip install -q --disable-pip-version-check --no-deps --target $@ $(OLDEST)
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

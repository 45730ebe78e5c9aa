PYTHON ?= python3
PIP = .venv/bin/pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint test-gpu bench-cpu bench-swap bench-gpu test-transformers clean

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

bench-gpu: .venv/dev
	.venv/bin/python -m benchmarks.gpu

test-gpu: .venv/dev
	KDA_LAYERS_REQUIRE=eager .venv/bin/python -m pytest tests/kernels tests/modeling

test-transformers: .venv/dev
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 tools/transformers_suite

.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e ".[plot]"
	touch $@

.venv/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

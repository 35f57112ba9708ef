# Two commands for a fresh machine: `make demo` and `make test`. Both make .venv and install what they need.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: setup demo test test-cpu bench clean

setup: .venv/.setup
demo: .venv/.setup
	$(BIN)/bace demo --out demo
test: .venv/.test
	$(BIN)/ruff check src tests benchmarks scripts
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadgroup
# What rounds (formulas, golden bands, exact resume) under every instruction set of this machine, with one thread and two:
# TIME minutes on two cores with AVX-512.
test-cpu: .venv/.test
	$(BIN)/python tests/cpu.py
bench: .venv/.test
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/bace_cost.py
	$(BIN)/python benchmarks/methods.py
	$(BIN)/python benchmarks/text.py
clean:
	rm -rf .venv build dist demo

.venv/bin/python:
	$(PYTHON) -m venv .venv
.venv/.setup: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e ".[report]"
	touch $@
.venv/.test: .venv/.setup
	$(BIN)/pip install --quiet -c constraints.txt -e ".[test]"
	touch $@

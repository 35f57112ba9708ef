# Two commands for a fresh machine: `make demo` and `make test`. Both make .venv and install what they need.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: setup demo docs test types tests test-quick test-cpu test-export test-parallel campaign bench clean

setup: .venv/.setup
demo: .venv/.setup
	$(BIN)/bace demo --out demo
test: .venv/.test
	$(BIN)/ruff check src tests benchmarks scripts examples
	$(MAKE) --no-print-directory -j 2 types tests
types:
	$(BIN)/mypy
tests:
	$(BIN)/pytest -n 2 --dist loadgroup
# While writing: lint, types, and the tests of the core, of one method of each kind, and of the architecture.
QUICK := architecture stream memory checkpoint randomness trainer adapters resources documentation readme
test-quick: .venv/.test
	$(BIN)/ruff check src tests benchmarks scripts examples
	$(BIN)/mypy
	$(BIN)/pytest -n 2 $(QUICK:%=tests/test_%.py) tests/formulas/test_losses.py tests/formulas/test_bace.py
# What rounds (formulas, golden bands, exact resume) under every instruction set of this machine, with one thread and two.
test-cpu: .venv/.test
	$(BIN)/python tests/cpu.py
# Every method that can be exported, on every modality, in onnxruntime: about ten minutes on one core.
test-export: .venv/.test
	$(BIN)/python tests/onnx_parity.py
# Every method in every modality, trained by two processes and by one: the same losses, weights and scores.
test-parallel: .venv/.test
	$(BIN)/python -W ignore tests/data_parallel.py
# Kills, signals, failing disks, damaged files and malformed inputs, and the report of what came of them: about half an
# hour on one core; goes on where it was stopped.
campaign: .venv/.test
	PYTHONPATH=tests $(BIN)/python -m campaign --out artefacts/campaign --report docs/reliability.md
# Every bar of docs/performance.md as one table and benchmarks/results.json: about 20 minutes, on a quiet machine only.
# avalanche-lib and faiss-cpu are installed from PyPI into an environment of their own (benchmarks/peers.py).
bench: .venv/.test
	$(BIN)/python benchmarks
# The documentation as a site: site/index.html opens in a browser. Its search needs a server: python -m http.server -d site
docs: .venv/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
clean:
	rm -rf .venv build dist demo site

.venv/bin/python:
	$(PYTHON) -m venv .venv
.venv/.setup: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e ".[report]"
	touch $@
.venv/.test: .venv/.setup
	$(BIN)/pip install --quiet -c constraints.txt -e ".[test]"
	touch $@

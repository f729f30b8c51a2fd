# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check lint types bench clean

demo: .venv/ready
	$(BIN)/cleave fleet sample --mix phone=600,laptop=300,desktop=60,sbc=40 --country us --seed 1 --out demo-fleet.csv
	$(BIN)/cleave plan --model llama-2-7b --tokens 131072 --fleet demo-fleet.csv --plot demo-plan.png

test: .venv/ready
	$(BIN)/pytest

check: lint types

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: .venv/ready
	$(BIN)/basedpyright

bench: .venv/ready
	$(BIN)/python benchmarks/run.py benchmarks/scenarios/gemm_planner.toml

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build demo-fleet.csv demo-plan.png

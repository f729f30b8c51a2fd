# Two commands set everything up on a fresh machine: `make demo` and `make test`.
# `make test` shows each law once; `make test-all`, which CI runs beside `make check`, also tests whole commands, pages and
# packages;
# `make test-exhaustive` runs every case of every grid and three times the generated examples.
PYTHON ?= python3
BIN := .venv/bin

# seconds for each target of `make fuzz`
FUZZ_S ?= 60

.PHONY: bench-scale demo test test-all test-exhaustive check lint types check-pages wasm bench bench-server bench-live bench-faults bench-trust bench-step-planner bench-resident bench-rivals bench-wire bench-slow bench-page rivals fuzz docs dist clean

demo: .venv/ready
	$(BIN)/cleave train

test: .venv/ready
	$(BIN)/pytest -m "not slow and not axe"

test-all: .venv/ready
	$(BIN)/pytest -m "not axe"

test-exhaustive: .venv/ready
	CLEAVE_TESTS=exhaustive $(BIN)/pytest -m "not axe"

check: lint types check-pages

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: .venv/ready
	$(BIN)/basedpyright

# types, own tests and accessibility of the pages; needs Node
check-pages: .venv/ready
	@if ! command -v npm >/dev/null; then echo "Node is not installed: the pages are not checked"; \
	elif ! (cd tests/web; [ -d node_modules ] || npm ci --silent --no-audit --no-fund); then \
		echo "npm cannot install TypeScript and axe: the pages are not checked"; test -z "$$CI"; \
	else set -e; (cd tests/web; npx tsc -p .; node --test --test-reporter=dot); $(BIN)/pytest -n 0 -rs -m axe tests/web; fi

# the kernel of browsers; needs clang-16 and lld-16
wasm:
	src/cleave/web/device/build-kernel

bench: .venv/ready
	$(BIN)/python benchmarks/run.py benchmarks/scenarios/gemm_planner.toml

bench-server: .venv/ready
	for script in event_loop schedule_scale checking; do $(BIN)/python benchmarks/$$script.py || exit 1; echo; done

bench-live: .venv/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[peers]'
	$(BIN)/python benchmarks/run.py benchmarks/scenarios/live.toml

fuzz: .venv/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fuzz]'
	for target in header frames stream device; do \
		$(BIN)/python fuzz/decoders.py $$target -max_total_time=$(FUZZ_S) || exit 1; \
	done

bench-resident: .venv/ready
	for script in home resident_bytes departure virtual_departure virtual_lease; do $(BIN)/python benchmarks/$$script.py || exit 1; echo; done

# other systems that train on several machines, in an environment of their own: torch first, at the version pinned here
rivals: build/rivals/ready

build/rivals/ready: constraints.txt
	$(PYTHON) -m venv build/rivals
	build/rivals/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0 numpy peft transformers
	build/rivals/bin/python -m pip install --quiet -c constraints.txt hivemind==1.1.12 torchft-nightly
	touch $@

# needs root and iproute2
bench-rivals: .venv/ready build/rivals/ready
	$(BIN)/python -m benchmarks.rivals $(addprefix benchmarks/fleets/,home4.csv mixed8.csv wifi4.csv) --models demo demo10 \
		--modes full lora --systems cleave torch --cores 2 --wires bf16 q8 --steps 8 --budget 14 \
		--only alone '4 stages, 8 micro-batches, bf16' '2 stages, 8 micro-batches, bf16' DT-FM --save benchmarks/results
	$(BIN)/python -m benchmarks.rivals.summary benchmarks/results
	$(BIN)/python -m benchmarks.recovery benchmarks/fleets/home4.csv --lora

bench-scale: .venv/ready
	$(BIN)/python benchmarks/scale.py

bench-trust: .venv/ready
	for options in "" --honest --cost; do $(BIN)/python benchmarks/lies.py $$options || exit 1; echo; done
	for script in stalls abuse; do $(BIN)/python benchmarks/$$script.py || exit 1; echo; done

bench-faults: .venv/ready
	$(BIN)/python benchmarks/run.py benchmarks/scenarios/verify.toml
	$(BIN)/python benchmarks/run.py benchmarks/scenarios/faults.toml

bench-step-planner: .venv/ready
	$(BIN)/python benchmarks/run.py benchmarks/scenarios/step_planner.toml
	$(BIN)/python benchmarks/run.py benchmarks/scenarios/few_devices.toml

bench-wire: .venv/ready
	$(BIN)/cleave bench benchmarks/scenarios/wire.toml --out build/wire

bench-slow: .venv/ready
	$(BIN)/cleave bench benchmarks/scenarios/slow64.toml --out build/slow64

# put the results of the two above on docs/benchmarks.md
bench-page: .venv/ready
	$(BIN)/python benchmarks/page.py build/wire/wire.json build/slow64/slow64.json

.venv/ready: pyproject.toml constraints.txt
	@echo "installing into .venv, which takes a few minutes the first time"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# the site in build/site; a broken link or anchor is an error
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# wheel and source distribution in dist/; the wheel is built from the source distribution, so that is complete
dist: .venv/ready
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf .venv build dist tests/web/node_modules

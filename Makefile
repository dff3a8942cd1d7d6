# One word runs each thing. Each sets up what it needs in .venv, from requirements/test.txt; the
# second time that takes no time. Needed on the machine: Python 3.11 or newer, make and git.
# JOBS is how many processes run tests; ARGS is passed on to the command.

JOBS ?= 2
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
UV_VERSION := 0.13.9

# Only names that really start and can make an environment count: a shim of a missing one does not.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14 python3 python

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore
export PYTHONUTF8 := 1

INSTALLED := $(VENV)/.installed
EDITABLE := $(VENV)/.editable

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint format contracts contracts-check contracts-claim mutants \
        bench explore sweep lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile
	@printf '\n  ARGS="…" is passed on; mutants take ID=INB-04.\n'

setup: $(EDITABLE) ## only set up the environment

demo: $(EDITABLE) ## see it work, on the scripted model
	$(PY) -m postroom.demo $(ARGS)

# A run that was narrowed by ARGS is no record of the whole.
test: $(EDITABLE) ## the default tests
	$(PY) -m pytest -n $(JOBS) --dist worksteal \
		$(if $(strip $(ARGS)),$(ARGS),--contracts-report=build/tests.json)

lint: $(EDITABLE) ## ruff, pyright (strict) and the import contracts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports --no-cache --no-logo

format: $(EDITABLE) ## put the code in the form that lint wants
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

contracts: $(EDITABLE) ## run the tests, then list the contracts that none of them proves
	$(PY) -m tools.contracts --check -- -n $(JOBS) --dist worksteal

contracts-check: $(EDITABLE) ## the same from the record of the last `make test`
	$(PY) -m tools.contracts --check --from build/tests.json

contracts-claim: $(EDITABLE) ## add what the last `make test` proved to docs/contracts-green.txt
	$(PY) -m tools.contracts --claim --check --from build/tests.json

mutants: $(EDITABLE) ## break the code on purpose: do the tests notice? ID=… for one contract
	$(PY) -m tools.mutants --jobs $(JOBS) $(foreach id,$(ID),--id $(id)) $(ARGS)

bench: $(EDITABLE) ## measure, and write bench/RESULTS.md
	$(PY) -m bench $(ARGS)

explore: $(EDITABLE) ## walk every interleaving of the state machines
	$(PY) -m tests.simulation.explorer $(or $(ARGS),base)

sweep: $(EDITABLE) ## the long campaigns: a crash at every commit, and their like
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m campaign --timeout 3600 \
		--hypothesis-profile=campaign $(ARGS)

lock: ## write requirements/test.txt from pyproject.toml; UPGRADE=1: newest versions
	@test -x build/lock/bin/python || { $(find-python); "$$python" -m venv build/lock; }
	build/lock/bin/python -m pip install --quiet uv==$(UV_VERSION)
	build/lock/bin/python -m tools.lock $(if $(UPGRADE),--upgrade)

clean: ## remove the environment and everything that was made
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define find-python
	python=; for name in $(PYTHONS); do \
		if "$$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
			>/dev/null 2>&1; then python="$$name"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "Python 3.11 or newer, with venv, is needed; none of these is: $(PYTHONS)" >&2; \
		exit 1; \
	fi
endef

$(PY):
	@$(find-python); echo "$$python -m venv $(VENV)"; "$$python" -m venv $(VENV)

$(INSTALLED): requirements/test.txt | $(PY)
	@echo "installing $< into $(VENV)"
	$(PY) -m pip install --quiet --require-hashes --no-deps -r $<
	@touch $@

$(EDITABLE): pyproject.toml $(INSTALLED)
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# `make demo` does all set-up and serves a model in the sandbox; `make test` does all set-up and runs every check.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:

BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# The collections of the PyPI package ansible; a clone's own ansible.cfg has the rest.
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
export MOLECULE_GLOB := molecule/*/molecule.yml
export PYTHONDONTWRITEBYTECODE := 1
# What `make test` runs; the longer ones by name: make molecule SCENARIOS="readiness checkpoint gateway qualify watchdog sandbox".
SCENARIOS = topology engine serve kernel thermal fabric preflight memory_guard image

# Areas whose tests run whole programs (on loopback, or ansible-playbook) or move real data; all others are fast.
PROGRAMS = $(addprefix tests/unit/,distribution/ fake_engine/ gateway/ memory_guard/ qualify/ watchdog/) tests/playbooks/
UNIT = $(filter-out $(PROGRAMS),$(wildcard tests/unit/*/))

.PHONY: $(UNIT) $(PROGRAMS) help setup engine demo ask test lint unit programs sanity molecule e2e bench bench-guard clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/.ready ## Make .venv with the pinned packages (finds Python 3.12 - 3.14)

.venv/.ready: requirements.txt requirements-dev.txt scripts/find-python.sh
	@python=$$(scripts/find-python.sh)
	echo "setup: .venv with $$($$python --version), packages of requirements-dev.txt"
	$$python -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

engine: ## Make sure that a Docker engine answers (installs docker.io on a Debian or Ubuntu without one)
	@scripts/engine.sh

demo: setup engine ## Bring the sandbox up, serve a model on two nodes, ask it something
	@scripts/demo.sh

test: lint unit programs molecule ## Run the checks of a landing (further ones: sanity, e2e, molecule with SCENARIOS)
	@echo "make test: all checks passed"

lint: setup ## ruff, mypy, yamllint, ansible-lint (production profile), changelog fragments, generated pages
	@ruff check .
	ruff format --check .
	mypy collections/ansible_collections/gb10/fleet/plugins
	yamllint --strict .
	ansible-lint --offline --strict
	antsibull-changelog lint
	python scripts/generate_readme.py --check
	python scripts/generate_troubleshooting.py --check

unit: setup ## Fast tests of functions and modules
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(UNIT)

# One process per area: what one area imports of Ansible's controller changes how modules of another one report warnings.
$(UNIT) $(PROGRAMS):
	@pytest $@

programs: setup ## The longer tests: programs, playbooks that touch no host, and what moves data
	@$(MAKE) --no-print-directory $(PROGRAMS)

sanity: setup ## antsibull-docs and ansible-test sanity over what git would ship
	@scripts/sanity.sh

molecule: setup engine ## One scenario per role, and the whole launch, with the fake engine (SCENARIOS="engine serve" picks)
	@for scenario in $(SCENARIOS); do
	  echo "=== molecule $$scenario"
	  molecule test --scenario-name $$scenario
	done

e2e: setup engine ## The sandbox with real vLLM on two nodes
	@pytest tests/e2e -v

bench: setup engine ## Measurements, side by side
	@for bench in benchmarks/*/bench.py benchmarks/serve/cold.py; do python $$bench; done

bench-guard: setup ## The memory guard beside the seed's design and no guard
	@python benchmarks/memory_guard/bench.py

clean: ## Remove every container, network, volume and image of the sandbox, .sandbox and caches (keeps .venv)
	@if [ -x $(BIN)/ansible-playbook ] && docker info >/dev/null 2>&1; then
	  ansible-playbook playbooks/sandbox.yml --tags down -e sandbox_state=absent
	fi
	rm -rf .sandbox .cache .ansible

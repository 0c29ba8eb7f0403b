# make demo    make an environment, bake a project, train its default experiment
# make test    all tests: the template's own, and those of a baked project
# make check   the quick ones: lint, types, unit tests
# make clean   remove what the others made: .venv and build

SHELL := /bin/bash
PYTHON ?= python3
CONSTRAINTS := {{cookiecutter.project_slug}}/constraints.txt
PROJECT := my-research# the default slug in cookiecutter.json
BAKE := .venv/bin/python -m cookiecutter . --no-input --default-config --output-dir

.PHONY: demo test check clean system env

demo: env
	rm -rf build/demo
	$(BAKE) build/demo >/dev/null
	@echo "To look at it afterwards:"
	@echo "  export VENV='$(CURDIR)/.venv'; cd build/demo/$(PROJECT); source env.sh; tensorboard --logdir runs"
	@export VENV="$$PWD/.venv" && cd build/demo/$(PROJECT) && source ./env.sh && python train.py

test: env
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m pytest

check: env
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m pytest -m "not slow"

clean:
	rm -rf .venv .venv.lock build .pytest_cache .ruff_cache

# The environment of a baked project, made by that project's env.sh, and cookiecutter. Quick when it is there.
env: system
	@[ -x .venv/bin/cookiecutter ] || { $(PYTHON) -m venv .venv && \
	    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c '$(CONSTRAINTS)' cookiecutter; }
	@rm -rf build/env && $(BAKE) build/env >/dev/null
	@export VENV="$$PWD/.venv" && source build/env/$(PROJECT)/env.sh

# What pip cannot install. torch.compile on CPU calls a C++ compiler and wants Python's headers.
system:
	@missing=""; version=$$($(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])') || exit 1; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing+=" $$version-venv"; \
	[ -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || missing+=" $$version-dev"; \
	type -P g++ >/dev/null || missing+=" g++"; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && type -P apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $$missing; \
	elif [[ $$missing = *venv* ]]; then echo "Needed, and only root can install it: apt install$$missing" >&2; exit 1; \
	else echo "Left out: torch.compile on CPU (only root can install it: apt install$$missing)"; fi

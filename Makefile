# make demo    make an environment, bake a project, train its default experiment
# make pictures   the README's pictures of the report and of TensorBoard, from the run of `make demo`
# make test    what decides whether the product works; README.md says how long each of these takes
# make soak    more of each kind: every strategy on nodes, every failure, and drawn runs
# make long    the rest of these kinds, for which CI has no time
# make chaos   the fault run: FAULTS=100 SEED=1; OUT=README.md puts the table there
# make twins   COUNT=500 SEED=1: runs drawn at random, interrupted and resumed, compared with ones that went through
# make neighbours   ROUNDS=100 SEED=1: runs, packing, installing and submitting at once; none may harm another
# make hostile   COUNT=5000 SEED=1: what others type, set and leave in files, drawn; each is right, or one sentence
# make ports   nine projects of other people in one, and what holds for each: training on one process, ddp and fsdp on two,
#              the same bits after a stop, a plan, a report, a job that is killed; OUT=docs/bring-your-own.md puts the table there
# make bench   what a step, a start, a save and a batch cost, and how right plan.py is, into benchmarks/results.json, README.md and docs/speed.png
# make bench-gpu   large networks on one GPU, into benchmarks/results.json and README.md: PY=python3, whose packages it uses;
#              FORK=, where PY has no cookiecutter, a folder that benchmarks/bench_project.py has made
# make check   the quick ones: lint and unit tests
# make clean   remove what the others made: .venv and build

SHELL := /bin/bash
PYTHON ?= python3
CONSTRAINTS := {{cookiecutter.project_slug}}/constraints.txt
PROJECT := my-research# the default slug in cookiecutter.json
# A project baked here uses the library as it is here.
export HPC_ML_FOLDER := $(CURDIR)
BAKE := .venv/bin/python -m cookiecutter . --no-input --default-config --output-dir

PY ?= python3
FAULTS ?= 100
SEED ?= 1
COUNT ?= 50
ROUNDS ?= 100

.PHONY: demo pictures test soak long chaos twins neighbours hostile ports bench bench-gpu check lint clean python system env

demo: env
	rm -rf build/demo
	$(BAKE) build/demo >/dev/null
	@echo "To look at it afterwards:"
	@echo "  export VENV='$(CURDIR)/.venv'; cd build/demo/$(PROJECT); source env.sh; tensorboard --logdir runs"
	@export VENV="$$PWD/.venv" && cd build/demo/$(PROJECT) && source ./env.sh && python train.py

pictures: system demo
	.venv/bin/python docs/report_pictures.py build/demo/$(PROJECT)
	docs/tensorboard.sh build/demo/$(PROJECT)/runs

# Files are taken in the order of their names, by which the longest do not come last. Tests often wait, for Slurm or for
# another rank, so that four workers fit on two cores.
test: system env lint
	.venv/bin/python -m pytest tests/hpc -n 4 --dist loadfile -m "not soak"
	.venv/bin/python -m pytest --ignore tests/hpc -n 4 --dist loadfile --no-loadscope-reorder -m "not soak"

# A few draws of each campaign, as tests; those below have more.
soak: system env
	.venv/bin/python -m pytest tests/hpc -n 4 --dist loadfile -m "soak and not long"
	.venv/bin/python -m pytest --ignore tests/hpc -n 4 --dist loadfile --no-loadscope-reorder -m "soak and not long"

long: system env
	.venv/bin/python -m pytest tests/hpc -n 4 --dist loadfile -m long
	.venv/bin/python -m pytest --ignore tests/hpc -n 4 --dist loadfile --no-loadscope-reorder -m long

chaos: system env
	.venv/bin/python tests/trial chaos --count $(FAULTS) --seed $(SEED) $(if $(OUT),--out $(OUT))

twins: system env
	.venv/bin/python tests/trial twins --count $(COUNT) --seed $(SEED)

neighbours: system env
	.venv/bin/python tests/trial neighbours --count $(ROUNDS) --seed $(SEED)

hostile: system env
	.venv/bin/python tests/trial hostile --count $(COUNT) --seed $(SEED)

ports: system env
	rm -rf build/ports
	$(BAKE) build/ports >/dev/null
	.venv/bin/python tests/trial ports --project build/ports/$(PROJECT) $(if $(OUT),--out $(OUT))

bench: system env
	for name in steps startup rejections loading checkpoints fast_defaults monitor published memory; do \
	    .venv/bin/python benchmarks/$$name.py --out benchmarks/results.json || exit 1; \
	done
	.venv/bin/python benchmarks/table.py benchmarks/results.json --readme README.md --plot docs/speed.png

bench-gpu:
	$(PY) benchmarks/models.py $(if $(FORK),--project '$(FORK)') --out benchmarks/results.json
	$(PY) benchmarks/memory.py --gpu $(if $(FORK),--project '$(FORK)') --out benchmarks/results.json
	$(PY) benchmarks/table.py benchmarks/results.json --readme README.md

check: system env lint
	.venv/bin/python -m pytest tests/hpc -n 4 --dist loadfile -m "not slow and not soak"
	.venv/bin/python -m pytest --ignore tests/hpc -m "not slow and not soak"

# The last line: which room of hpc may import which.
lint:
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/lint-imports --no-logo

clean:
	rm -rf .venv build .pytest_cache .ruff_cache

# The environment of a baked project, made by that project's env.sh, and cookiecutter. Quick when it is there.
env: python
	@[ -x .venv/bin/python ] || $(PYTHON) -m venv .venv
	@install=".venv/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)"; \
	[ .venv/.tests -nt tests/requirements.txt ] || { $$install -r tests/requirements.txt && \
	    $$install --no-deps --upgrade --target .venv/extra peft regex transformers && \
	    cp tests/extra_packages.pth .venv/lib/python3*/site-packages/ && touch .venv/.tests; }
	@rm -rf build/env && $(BAKE) build/env >/dev/null
	@export VENV="$$PWD/.venv" && source build/env/$(PROJECT)/env.sh

# Install packages of the system: APT NAME ... . No daemon of a package is started: policy-rc.d forbids it.
define APT
    [ "$$(id -u)" = 0 ] && type -P apt-get >/dev/null || return; \
    if [ ! -e /usr/sbin/policy-rc.d ]; then \
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT; \
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d; \
    fi; \
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "$$@"
endef

# What training needs and pip cannot install.
python:
	@get() { $(APT); }; \
	if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	    package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])') && get $$package || \
	    { echo "Needed, and only root can install it: apt install $${package:-python3-venv}" >&2; exit 1; }; \
	fi

# What tests need beside: for torch.compile on CPU a C++ compiler and Python's headers, for job scripts a Slurm, which
# runs in network namespaces of its own, with a database of accounts, for the report's page a browser, and for env.sh the other shell.
system:
	@get() { $(APT); }; wanted=""; \
	if [ ! -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; then \
	    wanted+=" $$($(PYTHON) -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"; \
	fi; \
	for pair in g++:g++ slurmctld:slurm-wlm munged:munge slurmdbd:slurmdbd mariadbd:mariadb-server ip:iproute2 \
	    shellcheck:shellcheck mpiexec:mpich chromium:chromium zsh:zsh; do \
	    PATH=$$PATH:/usr/sbin:/sbin type -P "$${pair%:*}" >/dev/null || wanted+=" $${pair#*:}"; \
	done; \
	if [ -n "$$wanted" ] && ! get $$wanted; then \
	    echo "Left out, with the tests that need it (root installs it by apt install):$$wanted"; \
	fi

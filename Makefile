# make demo   everything the main job needs, and runs it
# make test   everything the tests need, and runs the fast suite: 9 minutes on two cores
# make test-all     every test, part by part; one part alone: make test-unit, test-contract,
#                   test-simulation, test-numerics, test-groupings, test-processes, test-deploy
# make nightly      test-all, test-peers if PEERS is given, then make searches
# make searches     random tests, a deep search of the model, an hour of simulation: with SEED, which
#                   it prints; short with MINUTES=1 WALK=1000 MODEL='--nodes 2' SEARCHED=tests/contract/kv
# make test-peers PEERS=DIR   the peers' own suites, whose sources are in DIR, under this engine
# make test-libraries   the data and the loops of other libraries, in environments of their own
# make coverage     which branches of the decisions no unit test takes; all are taken
# make mutants      changes norm, sums, commit and restore in each small way: is it noticed? An hour
# make test-image   builds and runs the image: root, buildah, debootstrap, a network, minutes
# make check  format, lint, spelling, types, import contracts
# make dist   builds the sdist and the wheel, in dist
# make docs   builds the documentation as a site, in build/docs
# make reference    writes the pages of docs/ that are generated from the code
# make gpu-test     the checks that need a GPU: with GPU_PYTHON, at most 5 minutes
# make locks        writes deploy/locks; needs uv
# make clean        removes everything that make has made
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GPU_PYTHON ?= python3

# The tests wait as much as they compute, so two of them run for each of two cores.
PYTEST = $(BIN)/python -m pytest -n 4 --dist worksteal --durations=25 $(PYTEST_ARGS)
PARTS := test-unit test-contract test-simulation test-numerics test-groupings test-processes test-deploy

# The tests start hundreds of processes, and each would compile all sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all nightly searches $(PARTS) test-image test-peers test-libraries coverage mutants gpu-test check dist docs reference install dev locks clean

help:
	@sed -n "s/^# \(make\|    \)/\1/p" Makefile

demo: install
	$(BIN)/python examples/demo.py

test: dev
	$(PYTEST)

test-all: $(PARTS) test-image
	@if $(MAKE) $(ENVIRONMENTS); then $(MAKE) test-libraries; \
	else echo "the libraries cannot be installed here: test-libraries was left out"; fi

$(PARTS): test-%: dev
	$(PYTEST) -m 'not image' tests/$*

nightly: test-all $(if $(PEERS),test-peers)
	$(MAKE) searches

searches: SEED ?= $(shell date +%s)
searches: MINUTES ?= 60
searches: MODEL ?= --nodes 3
searches: WALK ?= 100000
searches: SEARCHED ?= tests/unit tests/contract tests/simulation tests/numerics/test_random_models.py tests/numerics/promises/test_combinations.py tests/numerics/promises/test_staying_anywhere.py tests/numerics/promises/test_several_places.py
searches: SEED := $(SEED)
searches: dev
	@echo "the same searches again: make searches SEED=$(SEED)"
	HYPOTHESIS_PROFILE=searching $(PYTEST) -m 'not image' --hypothesis-seed=$(SEED) $(SEARCHED)
	$(BIN)/python -m tests.model $(MODEL)
	$(BIN)/python -m tests.model --nodes 50 --walk $(WALK)
	$(BIN)/python -m tests.simulation --first $(SEED) --minutes $(MINUTES)

test-peers: dev
	$(BIN)/python -m tests.peers $(PEERS)

# Environments of their own: these libraries want other versions of what the rest uses, and those with
# data other ones than those with loops. uv finds some that suit each other within a minute, pip tries
# releases one by one for an hour. A test of what is not installed is skipped.
WITH_TESTS := filelock hypothesis pytest pytest-timeout pytest-xdist
ENVIRONMENTS := $(VENV)-data/.installed $(VENV)-loops/.installed

test-libraries: $(ENVIRONMENTS)
	$(VENV)-data/bin/python -m pytest -m "" tests/libraries tests/unit/libraries/test_versions.py $(PYTEST_ARGS)
	$(VENV)-loops/bin/python -m pytest -m "" tests/unit/libraries tests/processes/test_librar*.py $(PYTEST_ARGS)

$(VENV)-data/.installed: LIBRARIES = datasets grain megatron-energon 'mosaicml-streaming>=0.13' torchdata webdataset
$(VENV)-loops/.installed: LIBRARIES = accelerate lightning 'torchtitan>=0.3' 'transformers>=5.23' triton trl
$(VENV)-%/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python -e '.[etcd]' $(WITH_TESTS) $(LIBRARIES)
	@touch $@

coverage: dev
	$(PYTEST) --cov --cov-report=term tests/unit

mutants: dev
	$(BIN)/python -m tests.mutants

test-image: dev
	$(BIN)/python -m pytest -m image tests/deploy/test_image.py $(PYTEST_ARGS)

gpu-test:  # with any Python that has a torch with CUDA; no environment is made
	PYTHONPATH=.:engine:orchestrator $(GPU_PYTHON) -m tests.gpu

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports

dist: dev
	$(BIN)/python -m build --outdir dist

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs
	@echo build/docs/index.html

reference: dev
	$(BIN)/python -m docs.generate

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name it with PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[etcd,metrics,torch]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[etcd,metrics,torch,dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[etcd,metrics,torch,docs]'
	@touch $@

# What the image installs, with hashes. torch is left out: see deploy/Dockerfile. Needs uv.
locks:
	$(BIN)/python deploy/locks/make.py

clean:
	rm -rf $(VENV) $(VENV)-data $(VENV)-loops build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

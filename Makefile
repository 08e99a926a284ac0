# make demo   everything the main job needs, and runs it
# make test   everything the tests need, and runs them (they mostly wait: four at a time on two cores)
# make image-test   builds and runs the image: root, buildah, debootstrap, a network, minutes
# make slow-test    those that last for minutes, as an outage of one does
# make check  format, lint, types, import contracts
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test image-test slow-test check install dev clean

demo: install
	$(BIN)/python examples/demo.py

test: dev
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

image-test: dev
	$(BIN)/python -m pytest -m image tests/deploy/test_image.py $(PYTEST_ARGS)

slow-test: dev
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

check: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/.installed
dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name it with PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[etcd]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[etcd,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

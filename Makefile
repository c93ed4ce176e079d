# make train   set up and train on the text of the standard library, then write some text: RANKS=2 ARGS="--section.key value"
# make test    set up and run every test: ARGS="-k zero" goes to pytest, HPCZERO_TEST_RANKS="2 3" narrows the MPI runs
# make lint    set up, ruff and mypy
# make setup   the set-up alone: install/setup.sh says what can be chosen
SHELL := /bin/bash
RANKS ?= 2
RUN ?= runs/default
ARGS ?=
PYTHON := .venv/bin/python
SOURCES := $(sort $(dir $(wildcard hpczero/*.py tests/*.py scaling/*.py examples/*.py)))

.PHONY: setup train test lint
.NOTPARALLEL:

setup:
	@install/setup.sh

train: setup
	install/launch.sh $(RANKS) $(PYTHON) -m hpczero.train $(ARGS)
	install/launch.sh $(RANKS) $(PYTHON) -m hpczero.sample $(RUN) --prompt "def "

test: setup
	@$(PYTHON) tests/run.py $(ARGS)

lint: setup
	$(PYTHON) -m ruff check $(SOURCES)
	$(PYTHON) -m ruff format --check $(SOURCES)
	$(PYTHON) -m mypy $(SOURCES)

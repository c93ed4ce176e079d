# make train   set up and train on the text of the standard library, then write some text: RANKS=2 ARGS="--section.key value"
# make picture set up, train the same and put its loss plot at docs/loss.png: ARGS as above
# make test    set up and run the core of the tests: ARGS="-k zero" goes to pytest, HPCZERO_TEST_RANKS="0 2" narrows the ranks
# make test-all  every test, every case, every number of ranks, in hours; in parts with HPCZERO_TEST_RANKS: see CONTRIBUTING.md
# make quick   lint and the tests of what has changed, in under two minutes: ARGS="--since COMMIT"
# make lint    set up, ruff and mypy
# make examples  set up and train every adapter that comes along to its target, beside plain torch: ARGS="--only gcn"
# make docs    set up and build the site of the documentation in build/docs, with its search; warnings are errors
# make setup   what training takes, without linters and a SLURM for tests: install/setup.sh says what can be chosen
SHELL := /bin/bash
RANKS ?= 2
RUN ?= runs/default
ARGS ?=
PYTHON := .venv/bin/python
SOURCES := $(sort $(dir $(wildcard hpczero/*.py tests/*.py scaling/*.py examples/*.py docs/*.py)))

.PHONY: setup tools train picture test test-all quick lint docs examples
.NOTPARALLEL:

setup:
	@install/setup.sh

tools:
	@install/setup.sh tests

train: setup
	install/launch.sh $(RANKS) $(PYTHON) -m hpczero.train $(ARGS)
	install/launch.sh $(RANKS) $(PYTHON) -m hpczero.sample $(RUN) --prompt "def "

picture: setup
	install/launch.sh $(RANKS) $(PYTHON) -m hpczero.train --run.name picture --run.overwrite true $(ARGS)
	cp runs/picture/loss.png docs/loss.png

test: tools
	@$(PYTHON) tests/run.py $(ARGS)

test-all: tools
	@HPCZERO_TEST_ALL=1 $(PYTHON) tests/run.py $(ARGS)

quick: tools
	@$(PYTHON) tests/quick.py $(ARGS)

lint: tools
	$(PYTHON) -m ruff check $(SOURCES)
	$(PYTHON) -m ruff format --check $(SOURCES)
	$(PYTHON) -m mypy $(SOURCES)

examples: setup
	@$(PYTHON) examples/adapters.py --ranks $(RANKS) $(ARGS)

docs: setup
	@$(PYTHON) -c "import furo, myst_parser, sphinx" 2>/dev/null || \
		$(PYTHON) -m pip install --quiet -c install/constraints.txt --no-build-isolation -e ".[docs]"
	$(PYTHON) -m sphinx --quiet --fail-on-warning --keep-going -c docs -d build/doctrees . build/docs
	@echo build/docs/index.html

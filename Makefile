# Every target sets up what it needs in a virtual environment of the project's own and then does its work.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo test fuzz lint bench clean

help:
	@echo "make demo    two peers, a client, a direct tensor move, a DDP training on real data, a picture"
	@echo "make test    the test suite"
	@echo "make fuzz    10,000 examples on each codec and parser that strangers can reach; an hour and more"
	@echo "make lint    formatting, style, strict types, import directions"
	@echo "make bench   benchmarks against what one would use instead"
	@echo "make clean   remove the virtual environment and everything built"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("quicmesh needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@echo "Setting up $(VENV) (once, some minutes; PyTorch is the big part) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[apps,demo,test,lint]'
	@touch $@

demo: $(READY)
	@$(BIN)/python -m examples.demo

test: $(READY)
	@$(BIN)/python -m pytest
	@echo "Next: make demo, or $(BIN)/mesh up"

# The timeout is for a test of 10,000 examples; the suite's own is for one of a hundred.
fuzz: $(READY)
	@$(BIN)/python -m pytest -q -m fuzz --hypothesis-profile=thorough --timeout=1800

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(READY)
	@$(BIN)/python -m tests.benchmarks

clean:
	rm -rf $(VENV) build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis

# make train   everything from nothing: environment, data, the default model, a sample
# make test    the tests
# make check   lint, and types of the public functions
# make mutants break the code in many small ways and see that a test notices each
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

train: .venv/ready
	$(BIN)/python train.py
	$(BIN)/python sample.py

test: .venv/ready-dev
	$(BIN)/python -m pytest -n 2

check: .venv/ready-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy attention data runtime *.py

mutants: .venv/ready-dev
	$(BIN)/python tests/mutants.py

clean:
	rm -rf .venv

.venv/ready: requirements.txt
	@echo "making a virtual environment in .venv and installing requirements.txt (a few minutes)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) -r requirements.txt
	@touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	@touch $@

.PHONY: train test check mutants clean

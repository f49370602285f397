# make train   everything from nothing: environment, data, the default model, a sample
# make compare       five head designs, three seeds: which differences are real, in runs/compare/report.html
# make compare-long  the same over five seeds and longer, each design at its best learning rate
# make heads   one head and four learn what "it" means; runs/heads/heads.html shows where they look
# make test    the tests
# make check   lint, and types of the public functions
# make mutants break the code in many small ways and see that a test notices each
PYTHON ?= python3
BIN := .venv/bin
LONG := $(addprefix config/,single-head.toml mha.toml mha-16.toml gqa-2.toml mqa.toml) --baseline mha --seeds 5 \
	--rates 7.5e-4 1.5e-3 3e-3 --learning_rate 1.5e-3 --max_steps 1500 --schedule cosine \
	--out_dir runs/compare-long
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

train: .venv/ready
	$(BIN)/python train.py
	$(BIN)/python sample.py

compare: .venv/ready
	$(BIN)/python compare.py

compare-long: .venv/ready
	$(BIN)/python compare.py $(LONG) --jobs 2

heads: .venv/ready
	$(BIN)/python train.py config/probe/sentences.toml --n_head 1 --out_dir runs/one-head --overwrite
	$(BIN)/python train.py config/probe/sentences.toml --n_head 4 --out_dir runs/four-heads --overwrite
	$(BIN)/python heads.py runs/one-head --compare runs/four-heads --out_dir runs/heads

test: .venv/ready-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: .venv/ready-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy attention data lab runtime *.py

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

.PHONY: train compare compare-long heads test check mutants clean

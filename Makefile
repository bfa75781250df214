# Two commands do everything on a bare clone: make demo, make test. Both create .venv.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Processes of the tests: one more than two cores, since many a test waits for what it has started.
JOBS ?= 3
PLUGINS := plugins/deepspeed plugins/horovod plugins/lightning plugins/mpi
COMMA := ,

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint docs docs-serve guarantees keys bench gpu picture wheel clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.installed-recipes  ## train the digits recipe with DDP on two processes
	$(PY) -m torsh_trainer +recipe=digits strategy=ddp launcher.num_processes=2

test: lint docs  ## lint, types, import rules, strict docs, then the tests: every promise once
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m "not exhaustive"

test-all: lint docs  ## all tests with their matrices, then 10,000 random combinations beside plain PyTorch
	$(PY) -m pytest -n $(JOBS) --dist worksteal
	OMP_NUM_THREADS=1 $(PY) -m torsh_trainer.testing.fuzzing --combinations 10000 \
		--record tests/distributed/fuzzed.json

lint: $(VENV)/.installed-dev  ## ruff, mypy, import-linter
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

docs: $(VENV)/.installed-dev  ## build docs/ into site/, strictly
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

guarantees: $(VENV)/.installed-dev  ## write docs/guarantees.md from the tests
	$(PY) -m torsh_trainer.testing.guarantees

keys: $(VENV)/.installed-dev  ## write docs/migrate/keys.md from the rules of the translators
	$(PY) -m torsh_trainer.translate.keys_page

docs-serve: $(VENV)/.installed-dev  ## show the docs while you write them
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve

bench: $(VENV)/.installed-bench  ## measure beside the peers and write a table
	$(PY) -m benchmarks

gpu:  ## on a machine with a GPU: tests marked gpu, then benchmarks, in ten minutes (docs/gpu.md)
	@$(PYTHON) -m benchmarks.gpu --out $(or $(OUT),runs/gpu) $(if $(OFFLINE),--offline) \
		$(if $(BUDGET_S),--budget-s $(BUDGET_S)) $(if $(ONLY),--only $(ONLY))

picture: $(VENV)/.installed-bench  ## train digits under every engine and draw the README's picture
	$(PY) -m benchmarks.picture

wheel: $(VENV)/.installed-dev  ## build the wheel and the source archive into dist/
	$(PY) -m build --no-isolation

clean:  ## remove .venv, caches and build results; runs/ stays
	rm -rf $(VENV) .venv-gpu build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- installation: once, and again when pyproject.toml or constraints.txt change -----------------

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "Python 3.10 or later is needed; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	    echo "$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Always with constraints: without them pip takes the newest torch, whatever it brings along.
define install
	@echo "installing this project with the extras [$(1)]$(if $(2), and $(2)) into $(VENV), versions from constraints.txt"
	$(PY) -m pip -qq install --report $(VENV)/report.json -c constraints.txt -e '.[$(1)]' $(addprefix -e ./,$(2))
	@$(PY) -c 'import json; print("installed:", *("{name}=={version}".format(**i["metadata"]) for i in json.load(open("$(VENV)/report.json"))["install"]))'
endef

$(VENV)/.installed-recipes: pyproject.toml constraints.txt | $(PY)
	$(call install,recipes)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(PLUGINS:=/pyproject.toml) | $(PY)
	$(call install,dev,$(PLUGINS))
	$(PY) -m torsh_trainer_horovod.build
	$(PY) -m torsh_trainer_deepspeed.build deepspeed_shm_comm cpu_adam cpu_adagrad fused_adam pin_memory async_io
	@touch $(VENV)/.installed-recipes $@

$(VENV)/.installed-bench: pyproject.toml constraints.txt $(PLUGINS:=/pyproject.toml) | $(PY)
	$(call install,bench$(COMMA)recipes,$(PLUGINS))
	$(PY) -m torsh_trainer_horovod.build
	@touch $@

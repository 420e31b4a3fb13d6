# Needs Python 3.11 or newer: `make play PYTHON=python3.12` picks another one.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.installed

.PHONY: play test check clean

play: $(READY)
	$(VENV)/bin/hintloop play $(if $(findstring --resume,$(ARGS)),,--preset laptop) $(ARGS)

# In the order of tests/conftest.py: by default files with few tests come last, and those are the long ones.
test: $(READY)
	.ci/check
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(READY)
	.ci/check

# torch first, in its exact version: a range would admit a build with gigabytes of CUDA. Liger, to which tests compare
# our losses, alone: what it asks for is for GPUs.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[train,docker,replicas,dev]'
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps liger-kernel==0.8.5
	touch $@

clean:
	rm -rf $(VENV) .ns build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

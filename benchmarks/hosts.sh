#!/usr/bin/env bash
# Two hosts on this machine, network namespaces with a virtual cable between them, and a job of 2 ranks on each, over TCP.
# Needs root, ip and Open MPI:   PYTHON=.venv/bin/python benchmarks/hosts.sh [options of hosts.py]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$(realpath -s "${PYTHON:-python3}")
mpirun=$(dirname "$python")/mpirun
folder=$(mktemp -d)
names=(jaxmpi-a jaxmpi-b)

clean_up() {
  for name in "${names[@]}"; do ip netns del "$name" 2>/dev/null || true; done
  rm -rf "$folder"
}
trap clean_up EXIT

for i in 0 1; do
  ip netns add "${names[i]}"
  ip -n "${names[i]}" link set lo up
done
ip link add cable-a netns jaxmpi-a type veth peer name cable-b netns jaxmpi-b
for end in a b; do
  ip -n "jaxmpi-$end" addr add "10.77.0.$([ $end = a ] && echo 1 || echo 2)/24" dev "cable-$end"
  ip -n "jaxmpi-$end" link set "cable-$end" up
done

# What mpirun takes for ssh: it enters the namespace of the host, under a host name of its own.
cat > "$folder/ssh" <<'SSH'
#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
address=$1; shift
name=$([ "$address" = 10.77.0.1 ] && echo jaxmpi-a || echo jaxmpi-b)
exec ip netns exec "$name" unshare -u bash -c "hostname $name; $*"
SSH
chmod +x "$folder/ssh"

export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} PATH=$(dirname "$python"):$PATH
ip netns exec jaxmpi-a unshare -u bash -c "hostname jaxmpi-a; exec \"\$@\"" - \
  "$mpirun" --allow-run-as-root --prtemca plm_ssh_agent "$folder/ssh" --host 10.77.0.1:2,10.77.0.2:2 -n 4 \
  --map-by slot:OVERSUBSCRIBE --bind-to none -x PYTHONPATH -x PATH -x OMPI_MCA_mpi_yield_when_idle=1 \
  -x NPROC=1 -x OMP_NUM_THREADS=1 "$python" "$here/hosts.py" "$@"

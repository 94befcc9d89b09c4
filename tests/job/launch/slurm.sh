#!/usr/bin/env bash
# One node of Slurm on this machine for as long as a command runs. Needs root, and Debian's packages slurm-wlm and munge:
#
#     tests/job/launch/slurm.sh FOLDER COMMAND [its arguments]
#
# The command finds SLURM_CONF in its environment, so that srun, sbatch and scontrol speak to this node. FOLDER takes the
# daemons' files and logs. Their ports are chosen anew, and nothing outside of FOLDER is changed.
set -euo pipefail
folder=$(realpath "$1"); shift
host=$(hostname -s)
mkdir -p "$folder"/{state,spool}
chmod 755 "$folder"  # munged refuses others

# two free ports, of the controller and of the node
read -r controller node < <(python3 -c '
import socket
sockets = [socket.create_server(("", 0)) for _ in range(2)]
print(*(s.getsockname()[1] for s in sockets))')

# First the jobs, which their node's daemon has to report to the controller; then the daemons; then what is left of a job.
clean_up() {
  scancel --user root 2> /dev/null || true
  for _ in {1..50}; do [[ $(squeue --noheader --steps 2> /dev/null) ]] || break; sleep 0.1; done
  kill "${daemons[@]}" 2> /dev/null || true
  for pid in "${daemons[@]}"; do
    for _ in {1..50}; do kill -0 "$pid" 2> /dev/null || break; sleep 0.1; done
    kill -9 "$pid" 2> /dev/null || true
  done
  for process in /proc/[0-9]*; do
    if grep -qsz "^SLURM_CONF=$folder/slurm.conf$" "$process/environ" && [[ ${process#/proc/} != "$$" ]]; then
      kill -9 "${process#/proc/}" 2> /dev/null || true
    fi
  done
}
daemons=()
trap clean_up EXIT
trap 'exit 143' TERM

# who is who: a key that only root reads
(umask 077; head -c 128 /dev/urandom > "$folder/munge.key")
munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munge.pid" \
  --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" 2> "$folder/munged.err" &
daemons+=($!)

# As many tasks as the tests start, whatever the machine has: Slurm believes what the line of the node says.
cat > "$folder/slurm.conf" << CONF
ClusterName=jaxmpi
SlurmctldHost=$host
SlurmctldPort=$controller
SlurmdPort=$node
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
NodeName=$host CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES State=UP
CONF
export SLURM_CONF=$folder/slurm.conf

until [[ -S $folder/munge.socket ]]; do
  kill -0 "${daemons[0]}" || { cat "$folder"/munged.* >&2; exit 1; }
  sleep 0.1
done
slurmctld -D > "$folder/slurmctld.out" 2>&1 &
daemons+=($!)
slurmd -D -N "$host" > "$folder/slurmd.out" 2>&1 &
daemons+=($!)
for _ in {1..150}; do
  [[ $(sinfo --noheader --format %T 2> /dev/null) == idle ]] && ready=1 && break
  sleep 0.2
done
[[ ${ready:-} ]] || { echo "the node of Slurm does not come up:" >&2; tail "$folder"/*.log "$folder"/*.out >&2; exit 1; }

"$@"

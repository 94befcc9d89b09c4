#!/bin/sh
# Stands in for nvidia-cuda-mps-control: `-d` starts a daemon, other calls read one command.
# FAKE_MPS names what goes wrong; FAKE_MPS_SEEN is a file to which each call adds a line.
folder=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -d ]; then
  echo "start $folder gpus=$CUDA_VISIBLE_DEVICES" >> "$FAKE_MPS_SEEN"
  [ "$FAKE_MPS" = fails ] && { echo "An instance of this daemon is already running" >&2; exit 1; }
  [ "$FAKE_MPS" = silent ] && { echo "[2026] No GPU to share" > "$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 0; }
  [ "$FAKE_MPS" = hangs ] && sleep 60
  (trap '' TERM HUP; while :; do sleep 0.1; done) > /dev/null 2>&1 < /dev/null &
  echo $! > "$folder/pid"
  touch "$folder/control"
  exit 0
fi
read -r command
echo "$command" >> "$FAKE_MPS_SEEN"
pid=$(cat "$folder/pid" 2> /dev/null)
# a process that has ended, and that nobody waits for, has no environment
tr '\0' '\n' < "/proc/$pid/environ" 2> /dev/null | grep -q . || exit 1
[ "$command" = quit ] && [ "$FAKE_MPS" != stubborn ] && kill -9 "$pid"
exit 0

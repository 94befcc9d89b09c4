"""A supervisor, and a launcher that runs on after rank 0 has failed: hanging_script.py WHAT DIR.

WHAT rank 0 does: it "ends" without leaving, "tells" a failure before the ranks have joined, or
"leaves" in order while rank 1 works on. DIR is the folder of the run. With JAXMPI_RUN_DIR, this is
the launcher.
"""

import os
import sys
import time

from jaxmpi._job.launch import supervisor
from jaxmpi._job.process import launchers, run_dir
from jaxmpi._job.process.failure import Cause, Failure

what, folder = sys.argv[1:]


def supervise():
    supervisor.LAUNCHER_END_SECONDS = 2.0
    os.mkdir(folder, 0o700)
    environ = {**os.environ, "JAXMPI_RUN_DIR": folder}
    command = [sys.executable, *sys.argv]
    return supervisor.supervise(command, environ, folder, launchers.OPEN_MPI_5).code


def run_rank(rank):
    if what != "tells":
        run_dir.join(folder, rank)
    time.sleep(0.5 if rank == 0 else 5.0 if what == "leaves" else 60.0)
    if what == "tells":
        run_dir.report_failures(folder, [Failure(rank=1, cause=Cause.ABSENT, state="runs")])
    if what == "leaves":
        run_dir.leave(folder, rank)
    os._exit(0)


if "JAXMPI_RUN_DIR" not in os.environ:
    sys.exit(supervise())
for rank in range(2):
    if os.fork() == 0:
        run_rank(rank)
while what != "leaves":
    time.sleep(1.0)
for _ in range(2):
    os.wait()

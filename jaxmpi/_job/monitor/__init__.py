"""The monitor thread of each rank: stall reports, preemption, the flight recorder, the job's end.

monitor          the thread, its messages, and the end of a job whose rank is gone
watchdog         stall reports: who waits for whom, where, and what the missing ranks do
end_watch        the wait at the end of a rank, for ranks that are slow or stopped
activity         whether this rank gets on: CPU time, and callbacks that do not return
flight_recorder  a file with the last collectives of each rank
live             the record that `jaxmpi top` reads of each rank
neighbor_exchange  values that must be equal, compared while the ranks train
preemption       the call at which all ranks stop after a SIGTERM
death_reporter   a process that names the rank that was killed, where MPI does not
ordered_output   lines of text in the order of the ranks

`_world/session.py` starts them, in `watch`.
"""

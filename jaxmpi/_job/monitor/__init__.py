"""Monitoring on each rank: stall reports, preemption, the flight recorder, and ending a job whose rank has failed.

monitor          a thread on every rank that ends the job when one of them is gone
messages         objects from one monitor to another, by topic
watching         what the parts of a monitor use of it
watchdog         who waits for whom, where, and what the missing ranks are doing
death_reporter   a process that names the rank that was killed, where MPI does not
flight_recorder  the last collectives of each rank
live             what `jaxmpi top` shows of this rank
preemption       a call at which all ranks stop, once one has got a signal
async_gather     what all ranks say of one thing, whenever each comes to it
ordered_output   lines of text in the order of the ranks
"""

"""A job of several processes: how it is started, watched, ended and looked at.

launch   starts the ranks: `jaxmpi run`, `jaxmpi.launch`, the ranks of tests
process  a rank as a process of its host; imports no JAX
monitor  a thread on each rank: stalls, preemption, the end of a job whose rank has failed
tools    `jaxmpi doctor`, `jaxmpi top`, `jaxmpi timeline`
"""

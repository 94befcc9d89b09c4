"""Nobody hangs: what each rank does beside the program, and why a job ends.

guard     a thread on every rank that ends the job when one of them is gone
joining   who has not called `init`, while others wait there
peers     the ranks of this host, as other processes see them
children  processes that a rank starts
registry  who takes part, in files that `jaxmpi run` reads
turns     which thread communicates
witness   a process that names the rank that was killed, where MPI does not
stall     who waits for whom, where, and what the missing ranks are doing
recorder  the last collectives of each rank
stop      a call at which all ranks stop, once one has got a signal
signals   what the process is told, also while it stands inside MPI
rounds    lines of text in the order of the ranks
words     what it says, though a stream is full, closed or gone
"""

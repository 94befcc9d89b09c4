"""Ranks are started here: by `jaxmpi run`, by a notebook, by a test.

environment  what a job needs where it is started
request    what the command line asks for
mpiexec    which launcher there is, and whether it fits
plan       what the launcher is told
supervise  the launcher, run to its end
relay      its output, passed on
blame      which rank failed, and how
launch     all of that: `jaxmpi run`
task       what a waiting rank is given to run, and what it answers
pool       ranks that wait for functions to run, seen from outside
worker     one of these ranks
notebook   `jaxmpi.launch`
"""

"""How a rank of a plain JAX program ends its job, or leaves it.

The library runs this text in the program's Python (mpi_abi.cc), in a namespace of its own, where no
monitor of jaxmpi watches the rank. JAX waits at exit for all processes, of which some may wait for
this one in a collective: a rank that raises, or leaves by sys.exit with a code, ends the job before
that. Of another rank nothing is known: it may have come to its end in order, or by
`raise SystemExit(3)`. It begins to leave.
"""

import atexit
import builtins
import contextlib
import ctypes
import os
import sys
import threading

OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes, the last one of Ctrl-C


# What sys.exit was given, of calls that nothing has caught. After the first one come those that it
# has replaced: `except SystemExit: sys.exit(2)`.
uncaught = []


class Exit(SystemExit):
    """What sys.exit raises here, and Python takes for its own SystemExit.

    Where nothing catches it, Python drops it after the last frame of the main thread has ended, and
    before it calls the functions of atexit. What is caught is dropped in a frame, or later.
    """

    def __del__(self):
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and sys._getframe().f_back is None:
            uncaught.append(self.code)

    def __reduce__(self):  # another process knows Python's own class
        return SystemExit, self.args


# Programs read it in messages and logs.
Exit.__name__ = Exit.__qualname__ = "SystemExit"
Exit.__module__ = "builtins"


def exit(status=None, /):
    """Exit the interpreter, as sys.exit does."""
    if isinstance(status, SystemExit):
        raise status
    raise Exit(*(status if isinstance(status, tuple) else () if status is None else (status,)))


def install(end_job, begin_to_leave):
    """Install the hooks.

    Args:
      end_job: the address of a C function that ends the job with a code.
      begin_to_leave: the address of one that says that the program has come to its end.
    """
    end_job = ctypes.CFUNCTYPE(None, ctypes.c_int)(end_job)
    begin_to_leave = ctypes.CFUNCTYPE(None)(begin_to_leave)
    show, rank = sys.excepthook, os.getpid()  # a forked child is no rank

    def end(code):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # None, or closed
                stream.flush()
        end_job(code)

    def excepthook(kind, error, trace):
        show(kind, error, trace)
        if os.getpid() == rank:
            end(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else FAILED)

    def at_exit():
        if os.getpid() != rank:
            return
        status = uncaught[0] if uncaught and uncaught[0] is not None else OK
        code = status & 0xFF if isinstance(status, int) else FAILED  # and Python has printed it
        if code == OK:
            begin_to_leave()
        else:
            end(code)

    sys.excepthook = excepthook
    atexit.register(at_exit)
    replace_exit()


def replace_exit():
    """Put `exit` in the places of sys.exit and of Python's own exit() and quit()."""
    original, sys.exit = sys.exit, exit
    names = vars(sys.modules["__main__"])
    for name, value in list(names.items()):
        if value is original:  # from sys import exit
            names[name] = exit
    shell = getattr(builtins, "quit", None)
    if type(shell).__module__ == "_sitebuiltins":  # neither absent nor IPython's
        original_quit = type(shell).__call__

        def quit(self, code=None):
            with contextlib.suppress(SystemExit):
                original_quit(self, code)  # closes the standard input
            exit(code)

        type(shell).__call__ = quit

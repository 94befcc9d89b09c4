"""How a rank of a plain JAX program ends its job, or leaves it.

The library runs this text in the program's Python once JAX is imported (plain_rank.cc), in a
namespace of its own. The hooks act in ranks that no monitor of jaxmpi watches. JAX waits at exit
for all processes, of which some may wait for this one in a collective: a rank that raises, or
leaves by sys.exit with a code, ends the job before that. A rank that ends in any other way (at its
last line, or by `raise SystemExit(3)`) may have succeeded or failed. It only begins to leave: see
`leave_when_idle` in plain_rank.cc.
"""

import atexit
import builtins
import contextlib
import ctypes
import opcode
import os
import sys
import threading
import weakref

OK, FAILED, INTERRUPTED = 0, 1, 130  # exit codes, the last one of Ctrl-C
WATCHED, RANK, UNKNOWN = range(3)  # kinds of process: enum Process of plain_rank.cc
# (instruction, argument) of `finally`, `with`, `except` that does not match, and of a bare `raise`
RERAISES = {("RERAISE", 0), ("RERAISE", 1), ("RERAISE", 2), ("RAISE_VARARGS", 0)}


class Program:
    """The program of this process: its outermost frame, and the calls of sys.exit in it."""

    def __init__(self):
        in_main = threading.current_thread() is threading.main_thread()
        self.process = os.getpid()  # a forked child is no rank
        self.frame = outermost_frame() if in_main else None
        self.exits = weakref.WeakSet()
        self.statuses = []  # of those that nothing has caught, dropped at the program's end

    def has_ended(self):
        """Return whether the program's own code is over, and Python itself calls in its thread."""
        frame = outermost_frame()
        if threading.current_thread() is not threading.main_thread():
            return False
        if self.frame is None:  # another thread has installed the hooks
            return frame.f_globals is globals()
        return frame is not self.frame

    def error(self):
        """Return the error that has ended the program; None without one."""
        trace = getattr(sys, "last_traceback", None)  # Python sets it before it calls the hook
        return sys.last_value if trace and trace.tb_frame is self.frame else None

    def status(self):
        """Return what the sys.exit that has ended the program was given; None without one."""
        if self.statuses:
            return self.statuses[0]  # if one has replaced another, it is dropped before that
        # A cycle of references keeps one alive, as in absl.app.run. A program may keep one, too,
        # such as unittest's assertRaises, which removes its traceback.
        kept = (error for error in self.exits if error.__traceback__ is not None)
        return next((error.code for error in kept if is_uncaught(error)), None)


class Exit(SystemExit):
    """What sys.exit raises here, and Python takes for its own SystemExit.

    Where nothing catches it, Python drops it after the program's last frame and before it calls the
    functions of atexit, unless something else refers to it. One that was caught is dropped while
    frames run, or together with the SystemExit that has replaced it.
    """

    def __del__(self):
        if program.has_ended() and is_uncaught(self):
            program.statuses.append(self.code)

    def __reduce__(self):  # another process knows Python's own class
        return SystemExit, self.args


# Programs read it in messages and logs.
Exit.__name__ = Exit.__qualname__ = "SystemExit"
Exit.__module__ = "builtins"


def outermost_frame():
    """Return the outermost frame of this thread."""
    frame = sys._getframe()
    while frame.f_back:
        frame = frame.f_back
    return frame


def is_uncaught(error):
    """Return whether an exception has ended the program, which is over.

    It has if the last instruction of its traceback's first frame is the call from which the
    exception came, or one that raises again what was caught. After any other, the frame has
    returned, or has raised another exception in the place of this one. (The first frame is the
    outermost one; up to Python 3.11, the last one that had caught the exception.)
    """
    trace = error.__traceback__
    if trace is None:
        return True
    place, code = trace.tb_frame.f_lasti, trace.tb_frame.f_code.co_code
    return place == trace.tb_lasti or (opcode.opname[code[place]], code[place + 1]) in RERAISES


def exit(status=None, /):
    """Exit the interpreter, as sys.exit does."""
    if isinstance(status, SystemExit):
        status = status.args
    error = Exit(*(status if isinstance(status, tuple) else () if status is None else (status,)))
    if threading.current_thread() is threading.main_thread() and not program.has_ended():
        program.exits.add(error)
        run_first_at_exit()
    raise error


def exit_code(status):
    """Return the exit code that Python makes of what sys.exit is given."""
    if not isinstance(status, int):
        return OK if status is None else FAILED  # it has printed a text already
    return status & 0xFF if abs(status) < 1 << 63 else 0xFF


def code_of_error(error):
    """Return the exit code of a program that an error has ended."""
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


class Library:
    """The functions of the library that the hooks call; `install` sets them."""

    process_kind = end_job = begin_to_leave = None


def is_rank():
    """Return whether this process is a rank that no monitor of jaxmpi watches."""
    if os.getpid() != program.process:
        return False
    kind = Library.process_kind()
    if kind == UNKNOWN:  # before JAX has made its devices
        distributed = sys.modules.get("jax._src.distributed")
        return distributed is not None and distributed.global_state.client is not None
    return kind == RANK


def end(code):
    """End the job."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None, or closed
            stream.flush()
    Library.end_job(code)


def at_exit():
    """End the job if the program has failed; else begin to leave it."""
    if not is_rank():
        return
    error = None if has_prompt() else program.error()  # the hook may have been replaced
    code = exit_code(program.status()) if error is None else code_of_error(error)
    if code == OK:
        with contextlib.suppress(Exception):  # which JAX raises again in a moment
            sys.modules["jax"].effects_barrier()  # callbacks may still run, and programs after them
        Library.begin_to_leave()
    else:
        end(code)


def has_prompt():
    """Return whether Python goes on at a prompt after an error."""
    asked_for = sys.flags.interactive or (sys.flags.inspect and os.isatty(0))
    return asked_for or hasattr(sys, "ps1")


def run_first_at_exit():
    """Have Python call `at_exit` before all functions that have been registered until now.

    JAX's waits for the other processes. It is registered while JAX is imported.
    """
    atexit.unregister(at_exit)
    atexit.register(at_exit)


def begin():
    """Note that this process is a rank from now on: JAX makes its devices."""
    if os.getpid() != program.process:  # forked after the import of JAX
        program.__init__()
    run_first_at_exit()


def install(process_kind, end_job, begin_to_leave):
    """Install the hooks.

    Args:
      process_kind: the address of a C function that returns WATCHED, RANK or UNKNOWN.
      end_job: the address of one that ends the job with a code.
      begin_to_leave: the address of one that notes that the program has ended without a known
        failure.
    """
    Library.process_kind = ctypes.CFUNCTYPE(ctypes.c_int)(process_kind)
    Library.end_job = ctypes.CFUNCTYPE(None, ctypes.c_int)(end_job)
    Library.begin_to_leave = ctypes.CFUNCTYPE(None)(begin_to_leave)
    show = sys.excepthook

    def excepthook(kind, error, trace):
        show(kind, error, trace)
        # A program may call it itself.
        if program.has_ended() and not has_prompt() and is_rank():
            end(code_of_error(error))

    sys.excepthook = excepthook
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


program = Program()

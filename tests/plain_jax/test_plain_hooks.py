"""How the hooks of a plain JAX program see its end (native/plain_hooks.py), without JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

HOOKS = Path(__file__).parents[2] / "native" / "plain_hooks.py"
PROGRAM = f"""
KIND = 1  # a rank
from sys import exit as exit_of_sys
import argparse, asyncio, atexit, code, contextlib, ctypes, os, pickle, sys, threading, unittest
end = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda code: os.write(1, b"ends with %d\\n" % code))
kind = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: KIND)
leave = ctypes.CFUNCTYPE(None)(lambda: os.write(1, b"leaves\\n"))
def install():
    hooks = {{}}
    exec(open({str(HOOKS)!r}).read(), hooks)
    functions = (kind, end, leave)
    hooks["install"](*(ctypes.cast(f, ctypes.c_void_p).value for f in functions))
    process = os.getpid()
    atexit.register(lambda: os.getpid() == process and os.write(1, b"JAX waits\\n"))
    if KIND == 1:
        hooks["begin"]()
install()
print = None  # the hooks do not use the names of the program
def catch(*status):
    with contextlib.suppress(SystemExit):
        sys.exit(*status)
def leave_by(act, *arguments):
    act(*arguments)
def replace(error):
    try:
        sys.exit(3)
    except SystemExit:
        raise error
def keep_and_raise():
    try:
        sys.exit(3)
    except BaseException as error:
        kept = error  # a cycle: error, traceback, frame
        raise
async def coroutine():
    sys.exit(3)
@contextlib.contextmanager
def cleaning():
    try:
        yield
    finally:
        os.getpid()
class Replacing:
    __enter__ = lambda self: None
    def __exit__(self, *error):
        raise SystemExit(0)
def show_error():
    try:
        raise ValueError
    except ValueError:
        sys.excepthook(*sys.exc_info())
"""
ENDS = {  # how a program ends: what the hooks say
    "": "leaves",
    "sys.exit()": "leaves",
    "sys.exit(None)": "leaves",
    "sys.exit(0)": "leaves",
    "sys.exit(256)": "leaves",  # 0 for the system
    "sys.exit(3)": "ends with 3",
    "sys.exit(-1)": "ends with 255",
    "sys.exit(2**64)": "ends with 255",
    "sys.exit('text')": "ends with 1",
    "sys.exit((1, 2))": "ends with 1",
    "sys.exit(SystemExit(3))": "ends with 3",
    "exit(3)": "ends with 3",
    "quit(3)": "ends with 3",
    "exit_of_sys(3)": "ends with 3",
    "leave_by(leave_by, sys.exit, 3)": "ends with 3",
    "argparse.ArgumentParser().parse_args(['--unknown'])": "ends with 2",
    "raise ValueError": "ends with 1",
    "raise KeyboardInterrupt": "ends with 130",
    "sys.excepthook = lambda *error: None\nraise ValueError": "ends with 1",
    # caught
    "catch(3)": "leaves",
    "catch(3); raise SystemExit(0)": "leaves",
    "catch(3); sys.exit(4)": "ends with 4",
    "try: sys.exit(3)\nexcept SystemExit as error: kept = error": "leaves",
    "try: keep_and_raise()\nexcept SystemExit: pass": "leaves",
    "with unittest.TestCase().assertRaises(SystemExit) as kept: sys.exit(3)": "leaves",
    # caught, and raised again
    "try: sys.exit(3)\nfinally: 1": "ends with 3",
    "try: sys.exit(3)\nexcept ValueError: 1": "ends with 3",
    "try: sys.exit(3)\nexcept SystemExit: raise": "ends with 3",
    "try: sys.exit(3)\nexcept SystemExit as error: raise error": "ends with 3",
    "with cleaning(): sys.exit(3)": "ends with 3",
    "with contextlib.ExitStack() as stack: stack.callback(os.getpid); sys.exit(3)": "ends with 3",
    "keep_and_raise()": "ends with 3",
    "asyncio.run(coroutine())": "ends with 3",
    # replaced
    "try: sys.exit(3)\nexcept SystemExit as error: sys.exit(error.code + 1)": "ends with 4",
    "try: sys.exit(3)\nexcept SystemExit: sys.exit(0)": "leaves",
    "try: sys.exit(3)\nexcept SystemExit: raise SystemExit(0)": "leaves",
    "try: sys.exit(3)\nfinally: raise SystemExit(0)": "leaves",
    "with Replacing(): sys.exit(3)": "leaves",
    "replace(SystemExit(0))": "leaves",
    "replace(ValueError())": "ends with 1",
    # elsewhere
    "def f():\n  yield 1\n  sys.exit(3)\nfor x in f(): pass": "ends with 3",
    "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start()": "leaves",
    "atexit.register(sys.exit, 3)": "leaves",
    "atexit.register(catch, 3)": "leaves",
    "code.InteractiveInterpreter().runcode('1 / 0')": "leaves",
    "show_error()": "leaves",
    "thread = threading.Thread(target=show_error); thread.start()": "leaves",
    "if not os.fork(): sys.exit(3)\nos.wait()": "leaves",
    "if not os.fork(): raise ValueError\nos.wait()": "leaves",
}
SEEN_BY_NOBODY = "raise SystemExit(3)"


IN_A_THREAD = [
    "",
    "sys.exit(3)",
    "raise ValueError",
    "catch(3)",
    "keep_and_raise()",
    "show_error()",
]


@pytest.mark.parametrize("end", IN_A_THREAD)
def test_another_thread_may_have_installed_the_hooks(end, tmp_path):
    assert "\ninstall()\n" in PROGRAM
    thread = "thread = threading.Thread(target=install); thread.start(); thread.join()"
    (tmp_path / "program.py").write_text(PROGRAM.replace("\ninstall()\n", f"\n{thread}\n") + end)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[:1] == [ENDS[end]], done.stderr


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize("end", [*ENDS, SEEN_BY_NOBODY])
def test_the_end_of_a_program_is_seen(end, as_module, tmp_path):
    """What the hooks say first is what Python's exit code says."""
    (tmp_path / "program.py").write_text(PROGRAM + end)
    done = subprocess.run(
        [sys.executable, *(["-m", "program"] if as_module else ["program.py"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = ENDS.get(end, "leaves")
    assert done.stdout.splitlines()[:1] == [said], done.stderr
    code = done.returncode & 0xFF if done.returncode >= 0 else 130  # by SIGINT
    if end != SEEN_BY_NOBODY:
        assert said == (f"ends with {code}" if code else "leaves")


BEFORE_DEVICES = {  # whether JAX is connected to the other processes, an end: what is printed first
    (True, ""): "JAX waits",  # a rank that ends without devices is not known to have failed
    (True, "sys.exit(3)"): "ends with 3",
    (True, "raise ValueError"): "ends with 1",
    (True, "catch(3)"): "leaves",
    (False, "sys.exit(3)"): "JAX waits",
    (False, "raise ValueError"): "JAX waits",
}


@pytest.mark.parametrize(("connected", "end"), BEFORE_DEVICES)
def test_a_rank_may_end_before_jax_has_made_its_devices(connected, end, tmp_path):
    """A process that imports JAX and is no rank, such as a worker of a data loader, ends alone."""
    state = f"""
import types
module = sys.modules["jax._src.distributed"] = types.ModuleType("distributed")
module.global_state = types.SimpleNamespace(client={'"a client"' if connected else None})
"""
    program = PROGRAM.replace("KIND = 1  # a rank", "KIND = 2  # unknown") + state + end
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[:1] == [BEFORE_DEVICES[connected, end]], done.stderr


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError"])
def test_a_rank_with_a_monitor_is_left_to_it(end, tmp_path):
    program = PROGRAM.replace("KIND = 1  # a rank", "KIND = 0  # watched") + end
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "JAX waits\n", done.stderr


def test_what_sys_exit_raises_looks_like_pythons_own(tmp_path):
    check = """
try:
    sys.exit(3)
except SystemExit as error:
    assert (error.code, repr(error), str(error)) == (3, "SystemExit(3)", "3")
    assert type(pickle.loads(pickle.dumps(error))) is SystemExit
for status in ((1, 2), SystemExit(4)):
    try:
        sys.exit(status)
    except SystemExit as error:
        assert error.code == getattr(status, "code", status)
"""
    (tmp_path / "program.py").write_text(PROGRAM + check)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_an_error_before_a_prompt_ends_nothing(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM + "raise ValueError")
    done = subprocess.run(
        [sys.executable, "-i", "program.py"],
        cwd=tmp_path,
        input="1 / 0",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ValueError" in done.stderr and "ZeroDivisionError" in done.stderr
    assert done.stdout.splitlines()[0] == "leaves", done.stderr

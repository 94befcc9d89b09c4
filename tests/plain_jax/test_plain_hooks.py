"""How the hooks of a plain JAX program see its end (native/plain_hooks.py), without JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

HOOKS = Path(__file__).parents[2] / "native" / "plain_hooks.py"
PROGRAM = f"""
from sys import exit as exit_of_sys
import contextlib, ctypes, os, pickle, sys, threading
hooks = {{}}
exec(open({str(HOOKS)!r}).read(), hooks)
end = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda code: os.write(1, b"ends with %d\\n" % code))
leave = ctypes.CFUNCTYPE(None)(lambda: os.write(1, b"leaves\\n"))
hooks["install"](*(ctypes.cast(f, ctypes.c_void_p).value for f in (end, leave)))
print = None
def catch(*status):
    with contextlib.suppress(SystemExit):
        sys.exit(*status)
"""
ENDS = {  # how a program ends: what the hooks say
    "": "leaves",
    "sys.exit()": "leaves",
    "sys.exit(None)": "leaves",
    "sys.exit(0)": "leaves",
    "sys.exit(256)": "leaves",  # 0 for the system
    "sys.exit(3)": "ends with 3",
    "sys.exit(-1)": "ends with 255",
    "sys.exit('text')": "ends with 1",
    "sys.exit((1, 2))": "ends with 1",
    "exit(3)": "ends with 3",
    "quit(3)": "ends with 3",
    "exit_of_sys(3)": "ends with 3",
    "raise ValueError": "ends with 1",
    "raise KeyboardInterrupt": "ends with 130",
    "catch(3)": "leaves",
    "catch(3); raise SystemExit(0)": "leaves",
    "catch(3); sys.exit(4)": "ends with 4",
    "raise SystemExit(3)": "leaves",  # nobody sees that one
    "try: sys.exit(3)\nfinally: 1": "ends with 3",
    "try: sys.exit(3)\nexcept ValueError: 1": "ends with 3",
    "try: sys.exit(3)\nexcept SystemExit: raise": "ends with 3",
    "try: sys.exit(3)\nexcept SystemExit as error: raise error": "ends with 3",
    "try: sys.exit(3)\nexcept SystemExit as error: sys.exit(error.code + 1)": "ends with 4",
    "try: sys.exit(3)\nexcept SystemExit: sys.exit(0)": "leaves",
    "def f():\n  yield 1\n  sys.exit(3)\nfor x in f(): pass": "ends with 3",
    "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start()": "leaves",
    "if not os.fork(): sys.exit(3)\nos.wait()": "leaves",
    "if not os.fork(): raise ValueError\nos.wait()": "leaves",
}


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_program_is_seen(end, as_module, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM + end)
    done = subprocess.run(
        [sys.executable, *(["-m", "program"] if as_module else ["program.py"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[:1] == [ENDS[end]], done.stderr


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

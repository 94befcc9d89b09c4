"""Source lines of equations, calls and errors in the user's files."""

import os
import sys
import sysconfig
import warnings
from functools import cache
from types import FrameType
from typing import TypeAlias

from jax._src import source_info_util
from jax._src.lax import parallel
from jax.extend.core import JaxprEqn

from jaxmpi._job.process import stacks

LIBRARY_LINE = "a line of a library"  # in the place of a line of the user's, where there is none

CallSite: TypeAlias = tuple[tuple[str, int, int], ...]  # file, line and column of each frame


def call_site(eqn: JaxprEqn) -> CallSite:
    """Return the call that an equation comes from: its frames outside of JAX.

    An equation of a derivative has the call of the equation that it is derived from.
    """
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return tuple((frame.file_name, frame.start_line, frame.start_column) for frame in frames)


def source_line(eqn: JaxprEqn) -> str:
    """Return the user's line that an equation comes from, as "file:line"; "" if there is none.

    It is the innermost line outside of the libraries.
    """
    return _user_line(eqn.source_info)


def lowered_line() -> str:
    """Return the line, as in `source_line`, of the equation that is being lowered."""
    return _user_line(source_info_util.current())


def _user_line(source: source_info_util.SourceInfo) -> str:
    libraries = _library_folders()
    for frame in source_info_util.user_frames(source.traceback):
        if not frame.file_name.startswith(libraries):
            return f"{os.path.basename(frame.file_name)}:{frame.start_line}"
    return ""


def source_place(eqn: JaxprEqn) -> str:
    """Return the line of `source_line`, with the user's line if it is in an installed package.

    JAX knows the calls of an equation up to the loop or branch around it. If none of them is the
    user's, the line is that of the call that runs now.
    """
    line = source_line(eqn)
    calls = [
        (frame.file_name, frame.start_line)
        for frame in source_info_util.user_frames(eqn.source_info.traceback)
    ]
    calls = [(file, number) for file, number in calls if not in_library(file)]
    if not calls or not _is_installed(calls[0][0]):
        return line
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not in_library(frame.f_code.co_filename):
            calls.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    for file, number in calls:
        if not _is_installed(file):
            return f"{line} called from {os.path.basename(file)}:{number}"
    return line


def function_names(eqn: JaxprEqn) -> list[str]:
    """Return the qualified names of the functions that an equation comes from, innermost first."""
    traceback = eqn.source_info.traceback
    return [frame.function_name for frame in traceback.frames] if traceback else []


def is_transposed(eqn: JaxprEqn) -> bool:
    """Return whether an equation is of a backward pass: JAX has transposed others to make it."""
    for entry in getattr(eqn.source_info.name_stack, "stack", ()):
        # The names of `jax.named_scope` are in the stack, too, and are no Transform.
        if isinstance(entry, source_info_util.Transform) and entry.name == "transpose":
            return True
    return False


def library_function(eqn: JaxprEqn) -> str:
    """Return the name of the function of jaxmpi that the user has called for an equation.

    It is the outermost one, such as "distributed"; "" if there is none.
    """
    name = ""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.file_name.startswith(_package_folder()):
            name = frame.function_name.partition(".")[0]
    return name


def caller_line() -> str:
    """Return the user's line that runs now, as in `source_line`."""
    frame = caller()
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def caller() -> FrameType:
    """Return the innermost frame that runs now outside of the libraries."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _of_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def called_at(thread: int | None = None) -> str:
    """Return the user's line that a thread runs, as in `source_line`; "" if it runs none.

    Args:
      thread: the identifier of the thread; this one by default.
    """
    if thread is None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and in_library(frame.f_code.co_filename):
            frame = frame.f_back
    else:
        outside = (f for f in stacks.frames(thread) if not in_library(f.f_code.co_filename))
        frame = next(outside, None)
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def warn(text: str) -> None:
    """Warn at the user's line that runs, however many calls of the libraries lie between."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and in_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def failed_collective(error: BaseException) -> tuple[str, dict[str, object], str]:
    """Return (name, arguments, user's line) of JAX's collective that raised an error.

    The name is "" if the error comes from elsewhere.
    """
    libraries, line, traceback = _library_folders(), "", error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        file = frame.f_code.co_filename
        if file == parallel.__file__:
            return frame.f_code.co_name.lstrip("_"), dict(frame.f_locals), line
        if not file.startswith(libraries):
            line = f"{os.path.basename(file)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return "", {}, ""


def in_library(file: str) -> bool:
    """Return whether a file is part of JAX, Flax, optax, jaxmpi or Python itself."""
    return file.startswith((*_library_folders(), "<frozen", _standard_library()))


@cache
def _standard_library() -> str:
    return sysconfig.get_path("stdlib") + os.sep


@cache  # each eager collective asks about a few files
def _of_library(file: str) -> bool:
    return file.startswith(_library_folders())


@cache
def _package_folder() -> str:
    return os.path.dirname(sys.modules["jaxmpi"].__file__ or "") + os.sep


def _is_installed(file: str) -> bool:
    """Return whether a file is in a folder into which packages are installed."""
    return not {"site-packages", "dist-packages"}.isdisjoint(file.split(os.sep))


def _library_folders() -> tuple[str, ...]:
    files = (
        getattr(sys.modules.get(name), "__file__", None)
        for name in ("jax", "flax", "optax", "jaxmpi")
    )
    return tuple(os.path.dirname(file) + os.sep for file in files if file)

"""Where an equation or an error comes from, in the user's files."""

import os
import sys
import sysconfig
from functools import cache
from types import FrameType
from typing import TypeAlias

from jax._src import source_info_util
from jax._src.lax import parallel
from jax.extend.core import JaxprEqn

__all__ = [
    "CallSite",
    "call_site",
    "called_at",
    "caller",
    "caller_line",
    "failed_collective",
    "function_names",
    "in_library",
    "source_line",
    "source_place",
]

CallSite: TypeAlias = tuple[tuple[str, int, int], ...]  # file, line and column of each frame


def call_site(eqn: JaxprEqn) -> CallSite:
    """The call that an equation comes from: its frames outside of JAX. That of a derivative is that of what it is one of."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return tuple((frame.file_name, frame.start_line, frame.start_column) for frame in frames)


def source_line(eqn: JaxprEqn) -> str:
    """The user's line that an equation comes from, "file:line": the innermost one outside of the libraries; "" for none."""
    libraries = _library_folders()
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(libraries):
            return f"{os.path.basename(frame.file_name)}:{frame.start_line}"
    return ""


def source_place(eqn: JaxprEqn) -> str:
    """The line as in `source_line`; where that is in an installed package, such as a solver's, the user's line beside it.

    JAX knows the calls of an equation up to the loop or branch around it. Where none of them is the
    user's, it is the call that runs now.
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
    own = next(
        (f"{os.path.basename(file)}:{number}" for file, number in calls if not _is_installed(file)),
        "",
    )
    return f"{line} called from {own}" if own else line


def function_names(eqn: JaxprEqn) -> list[str]:
    """The qualified names of the functions that an equation comes from, innermost first."""
    traceback = eqn.source_info.traceback
    return [frame.function_name for frame in traceback.frames] if traceback else []


def caller_line() -> str:
    """The user's line that runs now, as in `source_line`."""
    frame = caller()
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def caller() -> FrameType:
    """The innermost frame that runs now outside of the libraries."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _of_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def called_at(thread: int | None = None) -> str:
    """The user's line that a thread is at, by default this one, as in `source_line`; "" where it runs none of the user's."""
    frame = sys._getframe(1) if thread is None else sys._current_frames().get(thread)
    while frame is not None and in_library(frame.f_code.co_filename):
        frame = frame.f_back
    return (
        f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if frame is not None
        else ""
    )


def failed_collective(error: BaseException) -> tuple[str, dict[str, object], str]:
    """The function of JAX's collectives that an error was raised in, its arguments, and the user's line; "" for no such."""
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
    """Whether a file is one of JAX's, Flax's, optax's or jaxmpi's, or Python's own."""
    return file.startswith((*_library_folders(), "<frozen", sysconfig.get_path("stdlib") + os.sep))


@cache  # each eager collective asks for a few files
def _of_library(file: str) -> bool:
    return file.startswith(_library_folders())


def _is_installed(file: str) -> bool:
    """Whether a file is in a folder into which packages are installed."""
    return not {"site-packages", "dist-packages"}.isdisjoint(file.split(os.sep))


def _library_folders() -> tuple[str, ...]:
    files = (
        getattr(sys.modules.get(name), "__file__", None)
        for name in ("jax", "flax", "optax", "jaxmpi")
    )
    return tuple(os.path.dirname(file) + os.sep for file in files if file)

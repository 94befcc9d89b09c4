"""Files in folders where other users may write, such as the temporary folder.

Whoever can write to a folder can put a link there under a name that is known before. So files are
made new and renamed, and a folder of our own is checked before it is used. Nothing here follows a
link in the last part of a path.
"""

import contextlib
import os
import secrets
import stat
from pathlib import Path

__all__ = ["check_path", "make_folder", "open_folder", "read", "replace", "replace_bytes"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_folder(path: str | Path, folder: int | None = None) -> None:
    """Make a folder that belongs to this user alone, unless something of that name exists.

    Args:
      path: by itself, or within `folder`.
      folder: the file descriptor of an open folder.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=folder)


def open_folder(path: str | Path, folder: int | None = None, *, private: bool) -> int:
    """Open a folder and return the file descriptor, which `os.close` closes.

    Args:
      path: by itself, or within `folder`.
      folder: the file descriptor of an open folder.
      private: whether it must belong to this user, and no other may write to it.

    Raises:
      OSError: it is not a folder, or it is a link.
      PermissionError: it must be private and is not.
    """
    opened = os.open(path, _FOLDER, dir_fd=folder)
    status = os.fstat(opened)
    if private and (
        status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        os.close(opened)
        raise PermissionError(f"{path} belongs to another user, or others may write to it")
    return opened


def check_path(path: Path) -> None:
    """Check that only this user and root could replace a folder of a path.

    In a sticky folder, such as /tmp, all users may write, and none can replace what is another's.

    Raises:
      PermissionError: another user could replace one of the folders.
    """
    for folder in (path, *path.parents):
        status = os.lstat(folder)
        others = (
            status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        )
        if stat.S_ISLNK(status.st_mode) or status.st_uid not in (0, os.geteuid()) or others:
            raise PermissionError(f"{folder} belongs to another user, or others may write to it")


def replace(folder: int, name: str, text: str) -> None:
    """Write a text file into an open folder, whole or not at all, instead of one of that name."""
    replace_bytes(folder, name, text.encode(), 0o666)


def replace_bytes(folder: int, name: str, data: bytes, mode: int = 0o600) -> None:
    """Write bytes as `replace` writes text, with the permissions of `mode` and the umask."""
    draft = f".{name}.{secrets.token_hex(8)}"
    try:
        with open(os.open(draft, _NEW, mode, dir_fd=folder), "wb") as file:
            file.write(data)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise


def read(path: Path) -> str:
    """Return the text of a regular file; an OSError for anything else, as it could block."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(f"{path} is no regular file")
    with open(opened, encoding="utf-8") as file:
        return file.read()

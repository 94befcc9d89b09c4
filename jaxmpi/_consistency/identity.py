"""Identities that compare across processes: of tree structures, functions and other objects.

They stand for objects that cannot be sent.
"""

import hashlib
import inspect
import pickle
import re
from types import CodeType

import numpy as np
from jax.tree_util import PyTreeDef

__all__ = ["identity", "same", "structure_of", "without_addresses"]


def structure_of(treedef: PyTreeDef) -> str:
    """Return a text that is the same in every process for one structure, static fields included."""
    node = treedef.node_data()
    if node is None:
        return "*"
    kind, static = node
    inner = ", ".join(map(structure_of, treedef.children()))
    return f"{kind.__qualname__}[{_plain(static)}]({inner})"


def _plain(static: object) -> str:
    """Return the `repr` of a static field without addresses and the order of a set."""
    if isinstance(static, set | frozenset):
        return "{" + ", ".join(sorted(map(_plain, static))) + "}"
    if isinstance(static, tuple | list):
        return f"({', '.join(map(_plain, static))})"
    if isinstance(static, dict):
        return (
            "{"
            + ", ".join(f"{_plain(key)}: {_plain(value)}" for key, value in static.items())
            + "}"
        )
    if isinstance(static, np.ndarray):
        return f"{static.dtype}{list(static.shape)}{hashlib.sha256(static.tobytes()).hexdigest()}"
    return without_addresses(repr(static))


def identity(obj: object) -> tuple[object, str]:
    """Return (identity to compare in another process, text for errors) of an object.

    Every rank calls it before it communicates: what the object's own code raises, on one rank
    perhaps, must not keep that rank from the others.
    """
    function = inspect.unwrap(obj) if callable(obj) else obj
    if isinstance(code := getattr(function, "__code__", None), CodeType):
        return _code(code), f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    try:
        text = repr(obj)
    except Exception:  # of the object's own code, here and below
        text = f"a {type(obj).__qualname__}"
    try:
        return pickle.dumps(obj), text
    except Exception:  # not PicklingError alone: a lock raises RuntimeError, ctypes ValueError
        return without_addresses(text), text


def _code(code: CodeType) -> tuple[object, ...]:
    """Return the code of a function without addresses."""
    consts: list[object] = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            consts.append(_code(constant))
        elif isinstance(constant, frozenset):
            consts.append(sorted(map(repr, constant)))
        else:
            consts.append(repr(constant))
    return code.co_code, code.co_names, consts


def without_addresses(text: str) -> str:
    """Return a text without the addresses in it, which differ between processes."""
    return re.sub("0x[0-9a-f]+", "", text)


def same(here: object, there: object) -> bool:
    """Return whether two identities are equal.

    Sets and the like may be equal even if their pickles are not. Objects that cannot be compared,
    such as a dataclass of arrays, differ if their pickles do: only some ranks may be asking.
    """
    if here == there or not (isinstance(here, bytes) and isinstance(there, bytes)):
        return bool(here == there)
    try:
        return bool(pickle.loads(here) == pickle.loads(there))
    except Exception:  # of the object's own code
        return False

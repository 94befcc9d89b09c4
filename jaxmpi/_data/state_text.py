"""The state of a loader that is not ours, as one line of text, which goes into any checkpoint.

Grain's, PyTorch's and Hugging Face's states are trees of numbers, text, bytes and arrays, whose
structure changes as the loader moves on. So they are no pytree that a checkpoint of fixed structure
could hold. The text is JSON, where what JSON does not have is an object with one key that begins
with "$". Reading it runs no code.
"""

import base64
import json
import sys
from importlib import import_module
from typing import Any

import numpy as np

__all__ = ["from_text", "to_text"]


def to_text(state: object) -> str:
    """Return a state as text; `from_text` gives it back, with types.

    Raises:
        TypeError: It holds something that is no number, text, bytes, array or container, with its
          path.
    """
    return json.dumps(_encoded(state, "the state"), separators=(",", ":"))


def from_text(text: str) -> Any:
    """Return the state that `to_text` has written."""
    return _decoded(json.loads(text))


def _encoded(x: object, path: str) -> Any:
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, bytes):
        return {"$bytes": base64.b64encode(x).decode()}
    if type(x) is list:
        return [_encoded(item, f"{path}[{i}]") for i, item in enumerate(x)]
    if type(x) is tuple:
        return {"$tuple": [_encoded(item, f"{path}[{i}]") for i, item in enumerate(x)]}
    if isinstance(x, dict):
        # pairs, where a key is no text or could be taken for one of ours
        if all(type(key) is str and not key.startswith("$") for key in x):
            return {key: _encoded(item, f"{path}[{key!r}]") for key, item in x.items()}
        pairs = [[_encoded(key, path), _encoded(x[key], f"{path}[{key!r}]")] for key in x]
        return {"$dict": pairs}
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biufc":
        return {"$array": _array(np.asarray(x)), "scalar": isinstance(x, np.generic)}
    # a tensor is only there where torch was imported by somebody else
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return {"$tensor": _array(x.detach().cpu().numpy())}
    raise TypeError(
        f"prefetch: {path} is a {type(x).__name__}, and a state that goes into a checkpoint holds "
        "numbers, text, "
        "bytes, arrays, lists and dicts. Have the loader's state hold these."
    )


def _array(x: np.ndarray) -> list[Any]:
    return [
        x.dtype.str,
        list(x.shape),
        base64.b64encode(np.ascontiguousarray(x).tobytes()).decode(),
    ]


def _decoded(x: Any) -> Any:
    if isinstance(x, list):
        return [_decoded(item) for item in x]
    if not isinstance(x, dict):
        return x
    if "$bytes" in x:
        return base64.b64decode(x["$bytes"])
    if "$tuple" in x:
        return tuple(_decoded(item) for item in x["$tuple"])
    if "$dict" in x:
        return {_decoded(key): _decoded(item) for key, item in x["$dict"]}
    if "$array" in x:
        array = _numbers(x["$array"])
        return array[()] if x["scalar"] else array
    if "$tensor" in x:
        # whose loader has written it, and is to read it
        return import_module("torch").from_numpy(_numbers(x["$tensor"]))
    return {key: _decoded(item) for key, item in x.items()}


def _numbers(fields: list[Any]) -> np.ndarray:
    dtype, shape, data = fields
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()

"""JAXMPI_CHECK=1: what should be equal on all ranks is compared, bit by bit, before and after every call of a step.

A step is many times slower with it: it is for finding out when, and where, replicas part.
"""

import zlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxmpi._backends.base import Backend
from jaxmpi._consistency.compare import outliers
from jaxmpi._errors import RankMismatchError
from jaxmpi._job.process import settings
from jaxmpi._leaves import is_key

__all__ = ["checksum", "compare", "wanted"]


def wanted() -> bool:
    """Whether JAXMPI_CHECK asks for it."""
    return bool(settings.get("JAXMPI_CHECK"))


def compare(
    backend: Backend,
    title: str,
    names: Sequence[str],
    leaves: Sequence[ArrayLike],
    equal: Sequence[bool],
) -> None:
    """Raise a RankMismatchError on all ranks, with the first of the arrays that is to be equal and is not.

    Args:
      backend: the ranks.
      title: of the step.
      names: of the arrays.
      leaves: the arrays.
      equal: which of them are to be equal.
    """
    sums = {name: checksum(x) for name, x, same in zip(names, leaves, equal, strict=True) if same}
    everyone = backend.allgather_object(sums)
    for name in sums:
        differs, who_has = outliers([of_rank.get(name) for of_rank in everyone])
        if differs:
            raise RankMismatchError(
                f"{title}: {name} is not equal on all ranks: {who_has} other values "
                "(JAXMPI_CHECK). Synchronize what is "
                "different from the start with jaxmpi.synchronize, and look for what changes it on "
                "one rank alone."
            )


def checksum(x: ArrayLike) -> int:
    """That of an array's bytes."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:  # a global one of the xla backend
        x = x.addressable_data(0)
    if isinstance(x, jax.Array) and is_key(x):
        x = jax.random.key_data(x)
    # the gradient of integers, which holds no numbers
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return 0
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)

"""Ranks of transport mpi4jax for tests whose other ranks use the native one."""

import pytest

from jaxmpi._job.launch.pool import Pool


def mpi4jax_pool(size, axes=None):
    """Return `size` new ranks; whoever has called this ends them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXMPI_TRANSPORT", "mpi4jax")
        return Pool(size, "mpi", axes)

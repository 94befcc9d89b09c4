"""Data-parallel training for JAX and Flax: pure functions on pytrees and one optax transform.

The names are those of `__init__.pyi`, and each is imported when it is first used: `jaxmpi run` does
without JAX.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

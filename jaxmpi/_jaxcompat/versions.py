"""Which versions of JAX these files were tested with."""

__all__ = [
    "TESTED",
]


TESTED = ("0.10.2", "0.11.2", "0.12.0.1")

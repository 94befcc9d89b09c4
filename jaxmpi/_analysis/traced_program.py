"""A traced program, with the paths of its inputs and outputs, as analyses take it."""

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

__all__ = ["TracedProgram"]


class TracedProgram(NamedTuple):
    """A traced program, with the paths of its inputs and outputs.

    Attributes:
      jaxpr: of `trace.trace`. Its first inputs are the arrays from outside; those of the arguments
        come after them.
      captured: the arrays from outside, which the function captured.
      ins: the paths of the arguments' arrays.
      outs: the paths of the outputs.
      declared: which outputs are declared replicated.
    """

    jaxpr: ClosedJaxpr
    captured: Sequence[ArrayLike]
    ins: Sequence[KeyPath]
    outs: Sequence[KeyPath]
    declared: Sequence[bool]

    @property
    def captured_count(self) -> int:
        """Return the number of inputs from outside, before those of the arguments."""
        return len(self.captured)

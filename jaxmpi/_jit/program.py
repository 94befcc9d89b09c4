"""The program of a function, for one kind of arguments and one backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.stages import Lowered
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from jaxmpi import _jaxcompat
from jaxmpi._analysis.forgotten_mean import Carried
from jaxmpi._consistency.mismatch import Call
from jaxmpi._jit.function import Function, Leaf
from jaxmpi._leaves import PyTree
from jaxmpi._lowering.plan import Entry
from jaxmpi._lowering.signature import Signature

__all__ = ["Program", "Run", "refuse_nan_search"]

T = TypeVar("T")
# of the arguments' arrays; see `Program.compiled`
Run: TypeAlias = Callable[[Sequence[Leaf]], tuple[jax.Array, PyTree]]


@dataclass(eq=False)
class Program:
    """Program of a function for arguments of certain shapes and dtypes."""

    function: Function
    # of the arguments' arrays to the outputs', for `jax.jit`
    call: Callable[[Sequence[Leaf]], list[Leaf]]
    tree: PyTreeDef  # of the outputs
    entries: Sequence[Entry]  # what it sends
    signature: Signature  # what the ranks compare
    # the traced program, where all ranks must run one compiled program; or None
    same_module: ClosedJaxpr | None
    arguments: list[str]  # in words
    donated: list[bool]  # for each array of the arguments
    outputs: list[str]  # in words
    # which arrays of the arguments, and of the outputs, are the same on all ranks
    equal: tuple[list[bool], list[bool]]
    # the arrays of the arguments that `replicated_argnums` names and that are one number
    scalars: list[int]
    captured: Sequence[ArrayLike] = ()  # the arrays that the function has from outside
    carried: Carried | None = None  # of which a call may show that a mean is forgotten
    # arrays of the arguments that must not all be equal, as all ranks would do the same
    fed: Sequence[int] = ()
    announced: bool = False
    # whether `compile_once` or `compile_alone` has handled it; False where JAX compiles it at its call
    compiled_once: bool = False
    # of the arguments' arrays; `compiled` sets it
    lower: Callable[[Sequence[Leaf]], Lowered] = field(init=False, repr=False)

    @property
    def statement(self) -> Call | None:
        """Call that the ranks compare; None if the program sends nothing."""
        return self.signature.statement

    def numbers(self, leaves: Sequence[Leaf]) -> list[str]:
        """Return the Python and NumPy numbers that must be equal on all ranks, such as a step count.

        Those that are numbers of JAX may not be known yet.
        """
        known = [i for i in self.scalars if not isinstance(leaves[i], jax.Array)]
        return [f"{self.arguments[i]} is {np.asarray(leaves[i]).item()}" for i in known]

    def lowered_to(self, lowered: Lowered) -> None:
        """Have the ranks compare what XLA compiles, a `jax.stages.Lowered`, where all must run the same."""
        if self.same_module is not None:
            self.signature.lowered_to(lowered, self.same_module)

    def __call__(self, leaves: Sequence[Leaf]) -> PyTree:
        """Trace it, inside of a `jax.jit`."""
        return self.tree.unflatten(self.call(leaves))

    def compiled(self, options: Mapping[str, object], leaves: Sequence[Leaf]) -> Run:
        """A function of the arguments' arrays that runs it, with these options of `jax.jit`.

        It returns an array that is ready when the program has ended, and that nobody donates, and
        the outputs. `leaves` are arrays of its first call; nothing is sent.
        """
        given, kept = (
            [i for i, d in enumerate(self.donated) if d == which] for which in (True, False)
        )
        order = np.argsort([*given, *kept]).tolist()

        def flat(given: Sequence[Leaf], kept: Sequence[Leaf]) -> tuple[jax.Array, list[Leaf]]:
            refuse_nan_search(self.function.title)
            leaves = (*given, *kept)
            return jnp.zeros((), jnp.bool_), self.call([leaves[i] for i in order])

        def run(leaves: Sequence[Leaf]) -> tuple[jax.Array, PyTree]:
            end, outs = jitted(take_given(leaves), take_kept(leaves))
            return end, self.tree.unflatten(outs)

        flat.__name__ = self.function.title
        jitted = jax.jit(flat, donate_argnums=0, **options)
        take_given, take_kept = _taker(given), _taker(kept)
        self.lower = lambda leaves: jitted.lower(take_given(leaves), take_kept(leaves))
        if self.same_module is not None and self.statement:
            self.lowered_to(self.lower(leaves))  # which the first call does not do again
        return run


def _taker(indices: Sequence[int]) -> Callable[[Sequence[T]], Sequence[T]]:
    """Return a function that selects these from a list; mostly its first or last ones."""
    if list(indices) == list(range(min(indices, default=0), max(indices, default=-1) + 1)):
        return itemgetter(slice(min(indices, default=0), max(indices, default=-1) + 1))
    return itemgetter(*indices)


def refuse_nan_search(title: str) -> None:
    """Raise a FloatingPointError where JAX, having found a NaN, runs a program again, equation by equation, on this rank alone.

    That is what `jax_debug_nans` and `jax_debug_infs` do outside of traced code; the other ranks
    would not take part.
    """
    looked_for = jax.config.jax_debug_nans or jax.config.jax_debug_infs
    if looked_for and _jaxcompat.at_top_level() and not jax.config.jax_disable_jit:
        raise FloatingPointError(
            f"{title}: an output on this rank has a NaN (jax_debug_nans) or an infinity "
            "(jax_debug_infs). To find where it "
            "comes from, run the script on one rank, where JAX looks for the operation."
        )

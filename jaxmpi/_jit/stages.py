"""A step that is compiled ahead of time: the stages of `jax.stages`, whose last the ranks compare before each call."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jaxmpi._leaves import PyTree

__all__ = ["Compiled", "Lowered", "Traced"]

Run: TypeAlias = Callable[[Callable[..., PyTree], tuple[PyTree, ...], dict[str, PyTree]], PyTree]


class _Stage:
    """A stage of `jax.stages`; it has all that JAX's own has.

    Args:
      stage: JAX's.
      run: calls what was compiled, `run(compiled, args, kwargs)`.
    """

    def __init__(
        self, stage: jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled, run: Run
    ) -> None:
        self._stage, self._run = stage, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class Traced(_Stage):
    """Result of `Step.trace`: a `jax.stages.Traced` whose `lower` returns a `Lowered`.

    Args:
      stage: JAX's.
      run: as that of the others.
      lowered_to: is called with JAX's next stage.
    """

    def __init__(
        self, stage: jax.stages.Traced, run: Run, lowered_to: Callable[[jax.stages.Lowered], None]
    ) -> None:
        super().__init__(stage, run)
        self._lowered_to = lowered_to

    def lower(self, *args: object, **kwargs: object) -> "Lowered":
        """Lower it; nothing is sent."""
        lowered = self._stage.lower(*args, **kwargs)
        self._lowered_to(lowered)
        return Lowered(lowered, self._run)


class Lowered(_Stage):
    """Result of `Step.lower`: a `jax.stages.Lowered` whose `compile` returns a `Compiled`."""

    def compile(self, *args: object, **kwargs: object) -> "Compiled":
        """Compile it; nothing is sent."""
        return Compiled(self._stage.compile(*args, **kwargs), self._run)


class Compiled(_Stage):
    """Result of `Lowered.compile`: a `jax.stages.Compiled` that the ranks compare at each call."""

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Compare, and run."""
        return self._run(self._stage, args, kwargs)

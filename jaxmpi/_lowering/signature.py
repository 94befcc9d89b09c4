"""Signature of a program: what the ranks compare, and what they show if it differs.

The ranks compare a fingerprint, 62 bits of a text:

    text = function, collectives in order, control equations, parameters of jaxmpi's functions

Where all ranks must run the same compiled module (xla), its digest is added (`lowered_to`). The
fingerprint goes to `_consistency/compare`, or into each message. If fingerprints differ, the ranks
exchange `details`, of which `_consistency/mismatch` makes the error.
"""

import hashlib
from collections.abc import Sequence

from jax.stages import Lowered

from jaxmpi import _jaxcompat
from jaxmpi._analysis.control_slice import Line
from jaxmpi._analysis.text import equations
from jaxmpi._backends.base import fingerprint_of
from jaxmpi._consistency.eager_calls import EagerCalls
from jaxmpi._consistency.mismatch import Call, CallDetails
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.plan import Entry

__all__ = ["Signature"]


class Signature:
    """Fingerprint of a program, and its lines for the error if fingerprints differ.

    Attributes:
      compared_call: the `Call`, title and fingerprint, that the ranks compare. None for a program
        without collectives and control equations: ranks may run it at any time, or one alone.
    """

    def __init__(
        self,
        title: str,
        entries: Sequence[Entry],
        control: Sequence[Line],
        *,
        parameters: Sequence[tuple[str, str]],
        arguments: Sequence[str],
        weak: Sequence[bool],
        calls: EagerCalls | None = None,
    ) -> None:
        """Compute the fingerprint.

        Args:
          title: of the program.
          entries: of `plan.entries_of`.
          control: of `control_slice`, and the arrays captured by the function where they must be
            equal.
          parameters: of `text.parameters`, each with its source line.
          arguments: each array argument as text; these are shown in an error, but not compared.
          weak: which arguments are of weak type, as Python numbers are; also for an error only.
          calls: the eager calls that may run this program, if the function is one of jaxmpi; the
            last of these traces it.
        """
        self._title, self._entries, self._control = title, entries, control
        self._parameters, self._arguments = parameters, arguments
        self._typed_arguments = [
            f"{text}, of weak type" if is_weak else text
            for text, is_weak in zip(arguments, weak, strict=True)
        ]
        self._calls, self._traced_at = calls, calls.line() if calls else ""
        # the module and the traced program, where the ranks compare them
        self._module: tuple[Lowered, AnyJaxpr] | None = None
        # Source lines may differ between the ranks.
        lines = [repr(entry._replace(source=())) for entry in entries]
        lines += [line.text for line in control]
        self.compared_call: Call | None = None
        if lines:
            # The title counts, too, because other functions may send the same.
            lines = [title, *lines, *(text for text, _ in parameters)]
            self.compared_call = Call.of(title, "\n".join(lines))

    @property
    def fingerprint(self) -> int:
        """Fingerprint of `compared_call`; 0 if that is None."""
        return self.compared_call.fingerprint if self.compared_call else 0

    def lowered_to(self, lowered: Lowered, jaxpr: AnyJaxpr) -> None:
        """Add a digest of the module, without its source lines, to the fingerprint.

        The first lowering counts: later ones of the same program change nothing.

        The module text has no large constants: these are compared as captured arrays.

        Args:
          lowered: the program for XLA.
          jaxpr: the program as it was traced, for an error.
        """
        if self.compared_call and self._module is None:
            self._module = lowered, jaxpr
            digest = hashlib.blake2b(
                _jaxcompat.module_text(lowered).encode(), digest_size=16
            ).hexdigest()
            self.compared_call = Call(
                fingerprint_of(f"{self.compared_call.fingerprint} {digest}"), self._title
            )

    def call_with(self, scalars: Sequence[str]) -> Call:
        """Return what the ranks compare before one call of the program.

        Args:
          scalars: of `Program.host_scalars`; they must be equal on all ranks.
        """
        call = self.compared_call
        assert call is not None
        if not scalars:
            return call
        program = call.fingerprint
        return Call(fingerprint_of(f"{program} {scalars}"), self._title, program)

    def sent(self, *, lately: bool = False) -> Sequence[Entry]:
        """Return the collectives of the program.

        JAX knows only the source line of the call that traced the program. In an eager function of
        jaxmpi it is replaced by the line of the call that runs now; with `lately`, by the lines of
        the last calls.
        """
        calls = self._calls
        if calls is None:
            return self._entries
        lines = calls.lines() if lately else [calls.line()]
        return [
            entry._replace(source=self._with_calls(entry.source, lines)) for entry in self._entries
        ]

    def _with_calls(self, source: Sequence[str], lines: Sequence[str]) -> tuple[str, ...]:
        """Return source lines with `lines` instead of the line of the call that traced."""
        replaced: list[str] = []
        for line in source:
            replaced += lines if line == self._traced_at else [line]
        return tuple(replaced)

    def _shapeless_collectives(self) -> list[str]:
        """Return all collectives with dtypes and numbers of axes, if one of them gathers.

        If these are equal and the shapes differ, the ranks have gathered arrays of unequal lengths.
        """
        if not any(entry.call.kind == "allgather" for entry in self._entries):
            return []
        return [
            f"{entry.name} {[(dtype, len(shape)) for shape, dtype in entry.arrays]}"
            for entry in self._entries
        ]

    def details(self, scalars: Sequence[str] = ()) -> CallDetails:
        """Return the lines of the program for an error.

        Args:
          scalars: of `Program.host_scalars`, where the ranks compare these, too.
        """
        details = CallDetails(
            collectives=[*map(str, self.sent())],
            arguments=self._arguments,
            parameters=[*self._parameter_lines(), *scalars],
            primitive_parameters=[text for entry in self._entries for text in entry.params],
            typed_arguments=self._typed_arguments,
            gathers=self._shapeless_collectives(),
            order=[
                f"{entry.name}, {'.'.join(map(str, entry.order))} in the function's order"
                for entry in self._entries
            ],
            control=[*map(str, self._control)],
        )
        if self._module is None:
            return details
        lowered, jaxpr = self._module
        module = _jaxcompat.module_text(lowered).splitlines()
        return details._replace(equations=[*equations(jaxpr)], module=module)

    def _parameter_lines(self) -> list[str]:
        """Return the parameters of jaxmpi's functions, each with its source line."""
        running_at = self._calls.line() if self._calls else ""
        lines = []
        for text, source in self._parameters:
            if self._calls and source in ("", self._traced_at):
                source = running_at
            lines.append(f"{text} at {source}" if source else text)
        return lines

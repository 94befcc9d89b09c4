"""Signature of a program: the facts that the ranks compare, and show if they differ."""

import hashlib
from collections.abc import Sequence

from jax.stages import Lowered

from jaxmpi import _jaxcompat
from jaxmpi._analysis.control_slice import Line
from jaxmpi._analysis.text import equations
from jaxmpi._backends.base import fingerprint_of
from jaxmpi._consistency.eager_calls import EagerCalls
from jaxmpi._consistency.mismatch import Call, Details
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.plan import Entry

__all__ = ["Signature"]


class Signature:
    """Collectives of a program in order, parameters of jaxmpi's functions, and control equations.

    Where all ranks must run the same module, `lowered_to` adds all of it.

    Attributes:
      statement: for the comparison; None where the ranks have nothing to agree on.
    """

    def __init__(
        self,
        title: str,
        entries: Sequence[Entry],
        decides: Sequence[Line],
        *,
        parameters: Sequence[tuple[str, str]],
        arguments: Sequence[str],
        weak: Sequence[bool],
        calls: EagerCalls | None = None,
    ) -> None:
        """Make the text that the ranks compare.

        Args:
          title: of the program.
          entries: of `plan.entries_of`.
          decides: of `control_slice`, and the arrays that the function holds where they must be
            equal.
          parameters: of `text.parameters`.
          arguments: in words, for an error only.
          weak: which of them are of weak type, as numbers of Python are.
          calls: of a function of ours, the eager calls that may run this program, the last of which
            has it traced.
        """
        self._title, self._decides = title, decides
        self._entries, self._parameters, self._taken = entries, parameters, arguments
        self._typed = [
            f"{text}, of weak type" if is_weak else text
            for text, is_weak in zip(arguments, weak, strict=True)
        ]
        self._calls, self._traced_at = calls, calls.line() if calls else ""
        self._called = [text for entry in entries for text in entry.params]
        self._order = [
            f"{entry.name}, {'.'.join(map(str, entry.order))} in the function's order"
            for entry in entries
        ]
        # and its module, where they are compared
        self._program: tuple[Lowered, AnyJaxpr] | None = None
        text = [repr(entry._replace(source=())) for entry in entries] + [
            line.text for line in decides
        ]
        if text:  # the function's name, too: other functions may send the same
            text = [title, *text, *(what for what, _ in parameters)]
        self.statement = Call.of(title, "\n".join(text)) if text else None

    @property
    def fingerprint(self) -> int:
        """Fingerprint of the statement; 0 if there is none."""
        return self.statement.fingerprint if self.statement else 0

    def lowered_to(self, lowered: Lowered, jaxpr: AnyJaxpr) -> None:
        """Have the ranks compare the module of this program, without its source lines.

        Its large constants are compared as arrays that the function holds.
        """
        if self.statement:
            self._program = lowered, jaxpr
            digest = hashlib.blake2b(
                _jaxcompat.module_text(lowered).encode(), digest_size=16
            ).hexdigest()
            self.statement = Call(
                fingerprint_of(f"{self.statement.fingerprint} {digest}"), self._title
            )

    def of_call(self, numbers: Sequence[str]) -> Call:
        """Return the facts to compare for a call with these numbers, which must be equal."""
        statement = self.statement
        assert statement is not None
        program = statement.fingerprint
        return (
            Call(fingerprint_of(f"{program} {numbers}"), self._title, program)
            if numbers
            else statement
        )

    def sent(self, *, lately: bool = False) -> Sequence[Entry]:
        """Return the collectives.

        Those of a function of ours have the line of the call that runs now; with `lately`, of all
        of its last calls.
        """
        calls = self._calls
        if calls is None:
            return self._entries
        lines = calls.lines() if lately else [calls.line()]
        return [
            entry._replace(source=self._with_calls(entry.source, lines)) for entry in self._entries
        ]

    def _with_calls(self, source: Sequence[str], lines: Sequence[str]) -> tuple[str, ...]:
        """Source lines with these in the place of that of the call that had the program traced."""
        return tuple(
            line for old in source for line in (lines if old == self._traced_at else [old])
        )

    def _gathered(self) -> list[str]:
        """Return all collectives with dtypes and numbers of axes, if one of them gathers."""
        if not any(entry.call.kind == "allgather" for entry in self._entries):
            return []
        return [
            f"{entry.name} {[(dtype, len(shape)) for shape, dtype in entry.arrays]}"
            for entry in self._entries
        ]

    def details(self, numbers: Sequence[str] = ()) -> Details:
        """All that is compared, in words."""
        line = self._calls.line() if self._calls else ""
        sources = [
            line if self._calls and source in ("", self._traced_at) else source
            for _, source in self._parameters
        ]
        parameters = zip(self._parameters, sources, strict=True)
        given = [
            *(f"{text} at {source}" if source else text for (text, _), source in parameters),
            *numbers,
        ]
        details = {
            "sent": [*map(str, self.sent())],
            "taken": self._taken,
            "given": given,
            "called": self._called,
        }
        details |= {"typed": self._typed, "gathered": self._gathered()}
        details |= {"ordered": self._order, "decided": [*map(str, self._decides)]}
        if self._program:
            lowered, jaxpr = self._program
            details |= {
                "computed": [*equations(jaxpr)],
                "compiled": _jaxcompat.module_text(lowered).splitlines(),
            }
        return details

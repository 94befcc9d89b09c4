"""What the ranks compare of a program before it communicates, and what they show where it differs."""

import hashlib
from collections.abc import Sequence

from jax.stages import Lowered

from jaxmpi import _jaxcompat
from jaxmpi._backends.base import fingerprint_of
from jaxmpi._consistency.compare import Details, Statement
from jaxmpi._jaxcompat import AnyJaxpr
from jaxmpi._lowering.control_slice import Line
from jaxmpi._lowering.summary import Entry
from jaxmpi._lowering.text import equations

__all__ = ["Signature"]


class Signature:
    """Of one program: its collectives, in order, the parameters of jaxmpi's functions, and what decides.

    Where all ranks must run the same module, `lowered_to` adds all of it.

    Attributes:
      sent: the collectives, in words.
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
    ) -> None:
        """Make the text that the ranks compare.

        Args:
          title: of the program.
          entries: of `summary`.
          decides: of `control_slice`, and the arrays that the function holds where they must be equal.
          parameters: of `text.parameters`.
          arguments: in words, for an error only.
        """
        self._title, self._decides = title, decides
        self.sent, self._taken = [*map(str, entries)], arguments
        self._parameters = [f"{text} at {source}" if source else text for text, source in parameters]
        self._called = [text for entry in entries for text in entry.params]
        self._order = [f"{entry.name}, {'.'.join(map(str, entry.order))} in the function's order" for entry in entries]
        self._program: tuple[Lowered, AnyJaxpr] | None = None  # and its module, where they are compared
        text = [repr(entry._replace(source=())) for entry in entries] + [line.text for line in decides]
        if text:  # the function's name, too: other functions may send the same
            text = [title, *text, *(what for what, _ in parameters)]
        self.statement = Statement.of(title, "\n".join(text)) if text else None

    @property
    def fingerprint(self) -> int:
        """That of the statement; 0 for none."""
        return self.statement.fingerprint if self.statement else 0

    def lowered_to(self, lowered: Lowered, jaxpr: AnyJaxpr) -> None:
        """Have the ranks compare the module, a `jax.stages.Lowered`, of this program; source lines don't count.

        Its large constants are compared as arrays that the function holds.
        """
        if self.statement:
            self._program = lowered, jaxpr
            digest = hashlib.blake2b(_jaxcompat.module_text(lowered).encode(), digest_size=16).hexdigest()
            self.statement = Statement(fingerprint_of(f"{self.statement.fingerprint} {digest}"), self._title)

    def of_call(self, numbers: Sequence[str]) -> Statement:
        """The statement with numbers that the program was called with, of those that must be equal."""
        statement = self.statement
        assert statement is not None
        program = statement.fingerprint
        return Statement(fingerprint_of(f"{program} {numbers}"), self._title, program) if numbers else statement

    def details(self, numbers: Sequence[str] = ()) -> Details:
        """All that is compared, in words."""
        given = [*self._parameters, *numbers]
        details = {"sent": self.sent, "taken": self._taken, "given": given, "called": self._called}
        details |= {"ordered": self._order, "decided": [*map(str, self._decides)]}
        if self._program:
            lowered, jaxpr = self._program
            details |= {"computed": [*equations(jaxpr)], "compiled": _jaxcompat.module_text(lowered).splitlines()}
        return details

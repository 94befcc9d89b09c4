"""For mkdocs: what docstrings show of a session stands in code blocks."""

import re
from typing import Any

import griffe


class Fences(griffe.Extension):
    """Puts paragraphs that begin with >>> between fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change a docstring that was found."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^([ \t]*)>>> (?:.*\n?)+?(?=\n|\Z)",
                lambda found: (
                    f"{found[1]}```python\n{found[0].rstrip()}\n{found[1]}```\n"
                ),
                obj.docstring.value,
                flags=re.MULTILINE,
            )

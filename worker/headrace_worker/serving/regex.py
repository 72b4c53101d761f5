r"""A regular expression of a request, with ``\d``, ``\w`` and ``\s`` read as ASCII classes.

The library reads them as Unicode, where an Arabic digit is a ``\d``; ECMA-262, and so the pattern
of a JSON schema, means 0 to 9. Each becomes a class in brackets, which may stand inside another
class in the library's syntax.
"""

from __future__ import annotations

import re

_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[A-Za-z0-9_]",
    r"\W": "[^A-Za-z0-9_]",
    r"\s": r"[\t\n\x0b\x0c\r ]",
    r"\S": r"[^\t\n\x0b\x0c\r ]",
}
# An escape is one part, whatever it escapes, and so are the two dashes of a difference of classes.
_PARTS = re.compile(r"--|\\.|.", re.DOTALL)


def with_ascii_classes(regex: str) -> str:
    """Return the expression for the library; one that ends inside an escape stays as it is."""
    parts = _PARTS.findall(regex)
    for i, part in enumerate(parts):
        if part in _CLASSES:
            parts[i] = _CLASSES[part]
            if i and parts[i - 1] == "-":  # else "+-[" would be a range up to the bracket
                parts[i - 1] = r"\-"
    return "".join(parts)

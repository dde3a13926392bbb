"""The exception for user errors, and names as text in messages; the command line prints them without a traceback.

The exception is defined in `vitmha.attention`, which can be copied into another project.
"""

import unicodedata

from vitmha.attention.errors import UserError

__all__ = ["UserError", "printable"]


def printable(text: str) -> str:
    r"""Returns the text with control characters and bytes that are not UTF-8 written as escapes.

    A terminal would obey a control character in a name: it could change colors, the title, or lines above.

    Args:
        text: May hold the surrogates by which Python represents a file name that is not UTF-8.

    Example:
        >>> printable("\x1b[31mred.png")
        '\\x1b[31mred.png'
    """
    # Spaces other than " " are printable too: the names of macOS's screenshots contain one.
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else ascii(c)[1:-1] for c in text)

"""The exception for user errors; the command line prints its message without a traceback.

It is defined in `vitmha.attention`, which can be copied into another project.
"""

from vitmha.attention.errors import UserError

__all__ = ["UserError", "printable"]


def printable(text: str) -> str:
    r"""Returns a name as text for a terminal: control characters and bytes that are not UTF-8 are escaped.

    Example:
        >>> printable("a\x1b[31m")
        'a\\x1b[31m'
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)

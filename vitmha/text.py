"""Names of files and classes as text that a terminal, a table or a figure can show."""

import unicodedata


def printable(text: str) -> str:
    r"""Returns the text with control characters and bytes that are not UTF-8 written as escapes.

    A terminal would obey a control character in a name: it could change colors, the title, or lines above.

    Args:
        text: May hold the surrogates by which Python represents a file name that is not UTF-8.

    Example:
        >>> printable("\x1b[31mred.png")
        '\\x1b[31mred.png'
    """
    # Spaces other than " " are kept: the names of macOS's screenshots contain one.
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else ascii(c)[1:-1] for c in text)

"""The exception for user errors, the check of a value, and names as text in messages.

The command line prints the message without a traceback.

The exception is defined in `vitmha.attention`, which can be copied into another project.
"""

from vitmha.attention.errors import UserError
from vitmha.text import printable

__all__ = ["UserError", "check_argument", "printable"]


def check_argument(name: str, value: object, is_valid: bool, expected: str) -> None:
    """Raises a `UserError` that names the argument if its value is not valid.

    jsonargparse's restricted types would check values that come from the command line only.

    Args:
        name: Of the argument.
        value: Of the argument.
        is_valid: Whether the value may be used.
        expected: Completes the sentence "NAME must be ...".

    Raises:
        UserError: `NAME must be EXPECTED, got VALUE`.

    Example:
        >>> check_argument("batch_size", 8, 8 >= 1, "at least 1")
    """
    if not is_valid:
        raise UserError(f"{name} must be {expected}, got {value if value != '' else repr(value)}")

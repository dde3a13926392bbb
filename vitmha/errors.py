"""The exception for mistakes of a user, which the command line prints as one line.

It is defined in `vitmha.attention`, which can be copied out without the rest of the package.
"""

from vitmha.attention.errors import UserError

__all__ = ["UserError"]

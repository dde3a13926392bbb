"""The exception for user errors, and names as text in messages; the command line prints them without a traceback.

The exception is defined in `vitmha.attention`, which can be copied into another project.
"""

from vitmha.attention.errors import UserError
from vitmha.text import printable

__all__ = ["UserError", "printable"]

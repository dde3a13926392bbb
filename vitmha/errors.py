"""The exception for user errors; the command line prints its message without a traceback.

It is defined in `vitmha.attention`, which can be copied into another project.
"""

from vitmha.attention.errors import UserError

__all__ = ["UserError"]

"""The exception for user errors. It is defined here so that this directory can be copied out of the package."""


class UserError(ValueError):
    """Invalid input or an invalid call: the message says what was expected, what was found and what to change."""

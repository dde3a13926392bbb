"""The exception for mistakes of a user. It is defined here, so that this folder can be copied out."""


class UserError(ValueError):
    """Invalid input or an invalid call: the message says what was expected, what was found and what to change."""

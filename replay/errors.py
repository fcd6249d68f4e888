"""The errors that reach a user: one line each, and the exit code that goes with it."""


class ReplayError(Exception):
    """Base of every error that is the user's to mend; ``exit_code`` follows docs/statuses.md."""

    exit_code = 2


class InputError(ReplayError):
    """Bad input, told as ``where: field: expected …, got …``."""

    def __init__(self, where: str, field: str, expected: str, got: str) -> None:
        super().__init__(f"{where}: {field}: expected {expected}, got {got}")
        self.where, self.field, self.expected, self.got = where, field, expected, got


class EnvironmentRefused(ReplayError):
    """The machine lacks something that was asked for by name, or is no longer the one that began the run."""

    exit_code = 5

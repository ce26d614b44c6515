"""The error of this package."""


class EvaluationError(ValueError):
    """An evaluation that cannot start or continue; the message says what to do."""

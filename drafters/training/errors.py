"""What a person who trains can cause: data that does not fit, a run that cannot go on."""


class TrainingError(ValueError):
    """Training cannot start or go on; the message says what to change."""

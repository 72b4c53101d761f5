"""What the engine raises: a start that cannot work, and a step that went wrong."""

from __future__ import annotations


class SettingsError(ValueError):
    """The engine cannot start with these settings; the message names the numbers."""


class EngineRefused(Exception):
    """The engine does not start, for a reason that was foreseen; the message says all there is."""


class StepTooLarge(RuntimeError):
    """The device has no memory for a step; nothing was committed, and a smaller one may fit."""


class EngineStepError(RuntimeError):
    """A step failed; with exactly one sequence id it is that one's fault, and the others go on."""

    def __init__(self, message: str, sequence_ids: tuple[int, ...]) -> None:
        self.sequence_ids = sequence_ids
        super().__init__(message)

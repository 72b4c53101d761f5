"""The history of a chaos run: every operation of a client invoked, then ok, failed or unknown."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from headrace.errors import RequestError


class Outcome(StrEnum):
    """What a client knows of an operation afterwards."""

    OK = "ok"
    FAILED = "failed"  # it was answered with "no"
    UNKNOWN = "unknown"  # it may have happened; so is every operation that has not ended


@dataclass(slots=True)
class Operation:
    """One call of a client."""

    number: int  # from 1, in the order of invocation
    kind: str  # enqueue, read, attach
    request_id: str
    invoked_s: float  # since the start of the run
    ended_s: float | None = None  # as above; None while it is under way
    outcome: Outcome = Outcome.UNKNOWN
    error: str = ""  # of what was not ok


class History:
    """Operations in memory, and each of their turns as a line of JSON on disk.

    Several threads may write; each line is written whole.
    """

    def __init__(self, path: Path) -> None:
        self.operations: list[Operation] = []
        self._file = path.open("w", encoding="utf-8")
        self._lock = threading.Lock()
        self._started_s = time.monotonic()

    @property
    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._started_s

    @contextmanager
    def operation(self, kind: str, request_id: str) -> Iterator[Operation]:
        """Record what happens inside; errors go on to the caller."""
        operation = Operation(len(self.operations) + 1, kind, request_id, self.now_s)
        self.operations.append(operation)
        self._tell(operation, "invoked")
        try:
            yield operation
        except BaseException as error:
            is_refusal = isinstance(error, RequestError)
            self._end(operation, Outcome.FAILED if is_refusal else Outcome.UNKNOWN, repr(error))
            raise
        self._end(operation, Outcome.OK)

    def note(self, what: str, **details: object) -> float:
        """Write down what the nemesis does; returns when, in seconds since the start."""
        at_s = self.now_s
        self._write({"at_s": round(at_s, 4), "nemesis": what, **details})
        return at_s

    def ids(self, kind: str, outcome: Outcome) -> list[str]:
        """Return the requests of all operations of a kind that ended so."""
        return [o.request_id for o in self.operations if (o.kind, o.outcome) == (kind, outcome)]

    def counts(self) -> dict[str, int]:
        """Count operations, under names such as ``enqueue ok``."""
        return dict(Counter(f"{o.kind} {o.outcome}" for o in self.operations))

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _end(self, operation: Operation, outcome: Outcome, error: str = "") -> None:
        operation.outcome, operation.error, operation.ended_s = outcome, error, self.now_s
        self._tell(operation, outcome.value)

    def _tell(self, operation: Operation, turn: str) -> None:
        line: dict[str, object] = {
            "at_s": round(self.now_s, 4),
            "number": operation.number,
            "operation": operation.kind,
            "request_id": operation.request_id,
            "turn": turn,
        }
        self._write({**line, "error": operation.error} if operation.error else line)

    def _write(self, line: dict[str, object]) -> None:
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

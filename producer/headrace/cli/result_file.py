"""The file of result lines: appended as requests finish, read when a run is taken up again."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from headrace.cli.batch_file import id_digest
from headrace.cli.batch_result import encode_line
from headrace.cli.exits import CommandError
from headrace.errors import ConfigurationError, ErrorCode

SYNC_EVERY_S = 1.0
FINAL_ERRORS = (ErrorCode.DEAD_LETTERED, ErrorCode.CANCELLED)
"""One would take down the next worker; the other is what somebody wanted."""


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """What earlier runs left in a result file."""

    answered: frozenset[bytes] = frozenset()  # digests of the custom_ids that are done
    num_failed: int = 0  # of those, how many with an error that is final
    attempts: dict[bytes, int] = field(default_factory=dict)  # digest → tries of what is not done


class ResultFile:
    """An append-only file of result lines, held by one process; a context manager.

    On opening, a torn last line is cut off and error lines that will be asked again are taken out,
    so the file never holds two lines for one input line. Raises ConfigurationError when it cannot
    be written, is held by another run, or holds something else than result lines; CommandError when
    a write fails later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # a rewrite must not replace a link
        self._file: BinaryIO | None = None
        self._synced_at_s = 0.0
        self.earlier = EarlierRun()

    def __enter__(self) -> Self:
        if self._path.exists() and not self._path.is_file():
            raise ConfigurationError(f"{self._path} is not a file; -o - writes to stdout")
        try:
            lock = open(self._path, "ab")
            try:
                self._hold(lock)
                self._check_current(lock)
                self.earlier, must_rewrite = _survey(self._path)
                if must_rewrite:
                    self._rewrite(lock)
                else:
                    self._file = lock
            except BaseException:  # Ctrl-C, too: the lock must not outlive the attempt
                lock.close()
                raise
        except OSError as error:
            raise ConfigurationError(f"{self._path} cannot be written: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with file:
                file.flush()
                os.fsync(file.fileno())
        except OSError as failure:
            if error is None:
                raise self._unwritable(failure) from failure

    def append(self, line: dict[str, Any]) -> None:
        """Write one line in one piece; force it to disk at most once a second."""
        assert self._file is not None, "append outside the with block"
        try:
            self._file.write(encode_line(line))
            self._file.flush()
            if time.monotonic() - self._synced_at_s > SYNC_EVERY_S:
                os.fsync(self._file.fileno())
                self._synced_at_s = time.monotonic()
        except OSError as failure:
            raise self._unwritable(failure) from failure

    def _unwritable(self, failure: OSError) -> CommandError:
        return CommandError(f"{self._path} cannot be written: {failure}")

    def _hold(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(f"another run is writing {self._path}") from error

    def _check_current(self, file: BinaryIO) -> None:
        """Raise when another run has replaced the file between our opening and our holding it."""
        if not os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
            raise ConfigurationError(f"another run is writing {self._path}")

    def _rewrite(self, lock: BinaryIO) -> None:
        """Replace the file by one without the lines that will be written anew."""
        fresh_path = self._path.with_name(f".{self._path.name}.resume")
        fresh = open(fresh_path, "wb")  # noqa: SIM115 - becomes the file of this object
        try:
            self._hold(fresh)
            with self._path.open("rb") as old:
                fresh.writelines(raw for raw, line in _whole_lines(self._path, old) if _stays(line))
            fresh.flush()
            os.fsync(fresh.fileno())
            fresh_path.replace(self._path)
        except BaseException:  # likewise
            fresh.close()
            raise
        lock.close()
        self._file = fresh


def _survey(path: Path) -> tuple[EarlierRun, bool]:
    """Return what the file holds, and whether some of it has to go."""
    answered: set[bytes] = set()
    attempts: dict[bytes, int] = {}
    num_failed, kept_bytes = 0, 0
    with path.open("rb") as file:
        for raw, line in _whole_lines(path, file):
            custom_id = line["custom_id"]
            if _stays(line):
                kept_bytes += len(raw)
                answered.add(id_digest(custom_id))
                num_failed += line["error"] is not None
            elif line["error"]["code"] != "duplicate_custom_id" and custom_id is not None:
                attempts[id_digest(custom_id)] = _attempt(line)
    earlier = EarlierRun(frozenset(answered), num_failed, attempts)
    return earlier, kept_bytes != path.stat().st_size


def _whole_lines(path: Path, file: BinaryIO) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for number, raw in enumerate(file, start=1):
        if not raw.endswith(b"\n"):
            return  # torn by a crash: its request is asked again
        try:
            line = json.loads(raw)
            is_result = {"custom_id", "error"} <= set(line) and "request_id" in line["response"]
        except (ValueError, TypeError, KeyError):
            is_result = False
        if not is_result:
            raise ConfigurationError(f"line {number} of {path} is no result line; nothing changed")
        yield raw, line


def _stays(line: dict[str, Any]) -> bool:
    """Whether a line is final: an answer, or an end that must not be repeated by itself.

    Any other error is asked again: its line may have been mended, or another worker serves now.
    """
    return line["error"] is None or line["error"]["code"] in FINAL_ERRORS


def _attempt(line: dict[str, Any]) -> int:
    """The number behind the last colon of the request id; see batch_id.py."""
    request_id = line["response"]["request_id"] or ""
    number = request_id.rpartition(":")[2]
    return int(number) if number.isdigit() else 0

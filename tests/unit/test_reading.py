"""One read over many logs: the command, what the reply means, which errors are for ever."""

from __future__ import annotations

import pytest
from redis import exceptions

from headrace.assembly import LogAssembly
from headrace.reading import ENTRIES_PER_READ, is_refusal, read_logs, read_logs_sync


class Wire:
    """Keeps the command, and answers with what the test gives."""

    def __init__(self, reply: dict[bytes, list[object]] | None = None) -> None:
        self.reply = reply or {}
        self.command: tuple[object, ...] = ()

    def execute_command(self, *command: object) -> dict[bytes, list[object]]:
        """Do as a blocking client does."""
        self.command = command
        return self.reply


class AsyncWire(Wire):
    """The same for asyncio."""

    async def execute_command(self, *command: object) -> dict[bytes, list[object]]:  # type: ignore[override]
        """Do as an asyncio client does."""
        return super().execute_command(*command)


def test_every_log_is_asked_for_behind_its_cursor() -> None:
    """Keys and cursors stand in the same order, with a bound on what one log may give."""
    wire = Wire()
    logs = [LogAssembly("a", "log-a"), LogAssembly("b", "log-b", after=7)]
    read_logs_sync(wire, logs, None)  # type: ignore[arg-type]
    streams = ("STREAMS", "log-a", "log-b", "0-0", "7-0")
    assert wire.command == ("XREAD", "COUNT", ENTRIES_PER_READ, *streams)


@pytest.mark.parametrize(("block_s", "block_ms"), [(5.0, 5000), (0.0004, 1), (0.0, 1)])
def test_no_block_is_for_ever(block_s: float, block_ms: int) -> None:
    """A wait becomes whole milliseconds, at least one: to Redis, zero means for ever."""
    wire = Wire()
    read_logs_sync(wire, [LogAssembly("a", "log")], block_s)  # type: ignore[arg-type]
    assert wire.command[3:5] == ("BLOCK", block_ms)


def test_log_with_two_readers_is_asked_for_once() -> None:
    """Two readers of one log share the answer, from the offset of the one that is behind."""
    entries = [(b"4-0", {})]
    wire = Wire({b"log": entries})  # type: ignore[dict-item]
    ahead, behind = LogAssembly("a", "log", after=9), LogAssembly("a", "log", after=3)
    found = read_logs_sync(wire, [ahead, behind], None)  # type: ignore[arg-type]
    assert wire.command[-2:] == ("log", "3-0")
    assert found == [(ahead, entries), (behind, entries)]


async def test_both_flavours_read_alike() -> None:
    """The asyncio and the blocking read send the same and return the same."""
    log = LogAssembly("a", "log")
    reply = {b"log": [(b"1-0", {})]}
    sync_wire, async_wire = Wire(reply), AsyncWire(reply)  # type: ignore[arg-type]
    found = await read_logs(async_wire, [log], 1.0)  # type: ignore[arg-type]
    assert found == read_logs_sync(sync_wire, [log], 1.0)  # type: ignore[arg-type]
    assert sync_wire.command == async_wire.command


def _wrapped(cause: Exception) -> Exception:
    error = exceptions.ConnectionError("wrapped")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (exceptions.AuthenticationError("WRONGPASS"), True),
        (_wrapped(exceptions.AuthenticationError("WRONGPASS")), True),
        (exceptions.NoPermissionError("no xread"), True),
        (exceptions.ResponseError("WRONGTYPE not a stream"), True),
        (exceptions.ConnectionError("reset"), False),
        (_wrapped(OSError("gone")), False),
        (exceptions.TimeoutError("slow"), False),
        (exceptions.BusyLoadingError("LOADING"), False),
        (exceptions.ResponseError("UNBLOCKED force unblock"), False),
        (TypeError("a bug of redis-py's"), False),
    ],
)
def test_only_what_never_heals_is_a_refusal(error: Exception, expected: bool) -> None:
    """A wrong password or right is for ever; all else may pass, and is tried again."""
    assert is_refusal(error) is expected

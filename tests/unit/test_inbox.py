"""An inbox wakes its stream: by what is fed to it, or by the one alarm that outlives its chunks."""

from __future__ import annotations

import asyncio

from headrace.assembly import LogAssembly, StreamAssembly
from headrace.multiplexer import Inbox
from headrace.protocol import CHUNK_FIELD, ChunkMessage, encode_chunk
from support.waiting import PATIENCE_S

FOR_EVER_S = 3600.0


def _inbox() -> tuple[Inbox, LogAssembly]:
    log = LogAssembly("r1", "log")
    return Inbox(StreamAssembly("r1", [log])), log


def _feed(inbox: Inbox, log: LogAssembly) -> None:
    """Let the next token come."""
    entry = encode_chunk(ChunkMessage((7,), ("a",)))
    inbox.feed(log, [(b"%d-0" % (log.num_tokens + 1), {CHUNK_FIELD: entry})])


def _alarms() -> list[asyncio.TimerHandle]:
    scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return [timer for timer in scheduled if not timer.cancelled()]


async def test_chunks_wake_the_stream_and_leave_one_alarm() -> None:
    """However many chunks come, one timer stands."""
    inbox, log = _inbox()
    for offset in range(5):
        _feed(inbox, log)
        await inbox.wait(FOR_EVER_S + offset)
    assert len(_alarms()) == 1
    inbox.close()
    assert not _alarms()


async def test_silence_ends_with_the_alarm() -> None:
    """Without news a wait ends after its time, again and again."""
    inbox, _ = _inbox()
    for _ in range(3):
        await inbox.wait(0.001)


async def test_a_shorter_wait_moves_the_alarm() -> None:
    """A wait that must end sooner than the alarm that stands does end then."""
    inbox, log = _inbox()
    _feed(inbox, log)
    await inbox.wait(FOR_EVER_S)
    await inbox.wait(0.001)
    assert not _alarms()


async def test_closing_wakes_whoever_waits() -> None:
    """A stream that is left while another task reads it keeps no task asleep for ever."""
    inbox, _ = _inbox()
    waiting = asyncio.create_task(inbox.wait(FOR_EVER_S))
    await asyncio.sleep(0)
    inbox.close()
    await asyncio.wait_for(waiting, PATIENCE_S)
    await inbox.wait(0.001)  # and looks at its clocks again
    assert not _alarms()

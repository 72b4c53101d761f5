"""Building calls and reading replies needs no server."""

from __future__ import annotations

import re

import msgpack
import pytest
from redis import exceptions

from headrace import calls, functions, parsing
from headrace.calls import Call
from headrace.errors import ProtocolError, TransportError
from headrace.functions import (
    EmitItem,
    EmitOutcome,
    EmitReply,
    Held,
    TenantDepth,
    library_code,
    run_sync,
)
from headrace.keys import Keys
from headrace.types import FinishReason, RequestState

KEYS = Keys("q")
_NAME = {"tenant": "t", "request_id": "r"}


def test_every_call_has_its_function() -> None:
    """What calls.py can ask for is what the library registers, and nothing else."""
    registered = set(re.findall(r"register\('(\w+)'", library_code()))
    built = {
        call.function
        for call in (
            calls.enqueue(KEYS, **_NAME, payload=b"", cost=1, priority=0, result_ttl_ms=1),
            calls.claim(
                KEYS,
                worker_id="w",
                nonce="n",
                free_seqs=1,
                free_tokens=1,
                total_tokens=1,
                lease_ms=1,
            ),
            calls.emit(KEYS, worker_id="w", items=[]),
            calls.finish(
                KEYS,
                worker_id="w",
                **_NAME,
                epoch=1,
                num_tokens=0,
                state=RequestState.FINISHED,
                terminal=b"",
                finish_reason="stop",
            ),
            calls.renew(KEYS, worker_id="w", held=[], lease_ms=1),
            calls.release(KEYS, worker_id="w", held=[]),
            calls.reap(KEYS, worker_id="w", lease_ms=1, count=1),
            calls.cancel(KEYS, **_NAME),
            calls.finish_now(KEYS, **_NAME),
            calls.reprioritise(KEYS, **_NAME, priority=0),
            calls.wishes(KEYS, worker_id="w", held=[]),
            calls.status(KEYS, **_NAME),
            calls.heartbeat(KEYS, worker_id="w", info={}, ttl_ms=1),
            calls.janitor(KEYS, worker_id="w", count=1),
            calls.depth(KEYS),
            calls.list_dead(KEYS),
            calls.replay_dead(KEYS, entry_id="1-0"),
            calls.purge_dead(KEYS),
        )
    }
    assert built == registered


def test_a_batch_is_sent_packed() -> None:
    """Behind the worker's name there is one argument, a flat list with six values an item."""
    item = EmitItem("t", "r", 2, 5, 3, b"chunk")
    call = calls.emit(KEYS, worker_id="w", items=[item, item])
    assert call.key == "{q}"
    worker_id, packed = call.args
    assert worker_id == "w"
    assert msgpack.unpackb(packed, raw=True) == [b"t", b"r", 2, 5, 3, b"chunk"] * 2


def test_an_emit_is_answered_with_its_exceptions() -> None:
    """An item that the reply does not name was appended, and its log ends with it."""
    items = [EmitItem("t", f"r{number}", 2, 5, 3, b"chunk") for number in range(3)]
    call = calls.emit(KEYS, worker_id="w", items=items)
    appended = EmitReply(EmitOutcome.OK, 8)
    assert call.parse([]) == (appended,) * 3
    assert call.parse([[2, b"GAP", 4]]) == (appended, EmitReply(EmitOutcome.GAP, 4), appended)


def test_held_requests_are_sent_flat() -> None:
    """Each is three arguments; a strike is a flag before them."""
    call = calls.release(KEYS, worker_id="w", held=[Held("t", "r", 4)], strike=True, max_strikes=5)
    assert call.args == ("w", 1, 5, "t", "r", 4)


def test_what_is_not_given_is_sent_empty() -> None:
    """None never travels as the word."""
    call = calls.enqueue(
        KEYS,
        tenant="t",
        request_id="r",
        payload=b"p",
        cost=1,
        priority=0,
        result_ttl_ms=9,
        attached=False,
    )
    assert call.args == ("t", "r", b"p", 1, 0, "", "", 9, "", 0, "")


@pytest.mark.parametrize("is_map", [False, True])
def test_counts_are_read_from_a_list_or_a_map(is_map: bool) -> None:
    """RESP2 and RESP3 tell a hash differently."""
    pairs = {
        b"queued": b"3",
        b"queued:0": b"1",
        b"queued:9": b"2",
        b"queued:0:acme": b"1",
        b"queued:9:acme": b"2",
        b"running": b"1",
        b"running:5": b"1",
        b"running:5:zeta": b"1",
        b"bytes": b"7",
        b"turn:0": b"12.5",
        b"since:0": b"1",
        b"sweep_cursor": b"0:0",
    }
    flat = [part for pair in pairs.items() for part in pair]
    depth = parsing.parse_depth(pairs if is_map else flat)
    assert (depth.queued, depth.running, depth.payload_bytes) == (3, 1, 7)
    assert depth.queued_by_lane == {0: 1, 9: 2}
    assert depth.by_tenant == {"acme": TenantDepth(3, 0), "zeta": TenantDepth(0, 1)}


def test_an_empty_queue_has_no_counts() -> None:
    """Missing fields are zeros."""
    assert parsing.parse_depth([]).queued == 0


@pytest.mark.parametrize("reply", [[b"x"], [[b"acme"]], [[b"acme", b"r1", b"x"]], [5], 7])
def test_a_reply_that_cannot_be_read_is_a_transport_error(reply: object) -> None:
    """Loops of a worker wait such errors out; no other may end them."""

    class Answering:
        def fcall(self, *_: object) -> object:
            return reply

    call = calls.renew(Keys("q"), worker_id="w1", held=[], lease_ms=1)
    with pytest.raises(ProtocolError, match="unreadable reply of renew"):
        run_sync(Answering(), call)  # type: ignore[arg-type]


def test_status_turns_milliseconds_into_seconds() -> None:
    """Times leave the queue's edge in seconds, and what is absent is None."""
    reply = [
        *(b"failed", b"4", b"2", b"1", b"9", None),
        *(b"1500", b"2500", b"3500", None),
        *(b"error", b"engine_failure", b"it broke"),
    ]
    status = parsing.parse_status(reply, "r1")
    assert status is not None
    assert (status.state, status.num_tokens, status.epoch) == (RequestState.FAILED, 4, 2)
    assert (status.strikes, status.priority, status.owner) == (1, 9, None)
    assert (status.enqueued_at_s, status.started_at_s, status.finished_at_s) == (1.5, 2.5, 3.5)
    assert status.deadline_at_s is None
    assert status.finish_reason is FinishReason.ERROR
    assert (status.error_code, status.error_message) == ("engine_failure", "it broke")


class _Refusing:
    """A connection that answers every call with one error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def fcall_ro(self, *_args: object) -> object:
        raise self.error


@pytest.mark.parametrize(
    ("error", "is_passing"),
    [
        (exceptions.ConnectionError("gone"), True),
        (exceptions.TimeoutError("slow"), True),
        (OSError("no route"), True),
        (TypeError("write to a transport that is gone"), True),
        (AttributeError("'NoneType' object has no attribute 'write'"), True),
        (exceptions.BusyLoadingError("loading"), True),
        (exceptions.OutOfMemoryError("full"), True),
        (exceptions.ReadOnlyError("replica"), True),
        (exceptions.TryAgainError("moving"), True),
        (exceptions.ClusterDownError("Hash slot not served"), True),
        (exceptions.MasterDownError("Link with MASTER is down"), True),
        (exceptions.ResponseError("MISCONF Errors writing to the AOF file"), True),
        (exceptions.ResponseError("BUSY Redis is busy running a script"), True),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas"), True),
        (exceptions.ResponseError("UNBLOCKED the stream key no longer exists"), True),
        (exceptions.ResponseError("headrace: cost must be a whole number"), False),
        (exceptions.NoPermissionError("no permissions"), False),
        (exceptions.AuthenticationError("wrong password"), False),
    ],
)
def test_passing_trouble_is_told_from_a_refusal(error: Exception, is_passing: bool) -> None:
    """Whether the same call may succeed later depends on what Redis says."""
    with pytest.raises(TransportError) as failure:
        run_sync(_Refusing(error), calls.depth(KEYS))  # type: ignore[arg-type]
    assert failure.value.retryable_later is is_passing
    assert failure.value.__cause__ is error


def test_one_import_is_enough() -> None:
    """functions.py hands on every builder and every reply."""
    assert all(hasattr(functions, name) for name in functions.__all__)
    assert functions.Call is Call

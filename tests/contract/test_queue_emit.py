"""emit: tokens enter a log once, in order, from the one holder."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from redis import Redis
from redis.exceptions import ResponseError

from headrace import functions
from headrace.errors import TransportError
from headrace.functions import EmitOutcome, EmitReply
from support.queue_driver import QueueDriver, chunk_of


def test_chunks_are_stored_under_their_end_offset(driver: QueueDriver) -> None:
    """The entry id is the number of tokens up to the end of the chunk."""
    driver.enqueue()
    grant = driver.grant()
    assert driver.emit(grant, 0, 1) == EmitReply(EmitOutcome.OK, 1)
    assert driver.emit(grant, 1, 4) == EmitReply(EmitOutcome.OK, 5)
    assert [entry_id for entry_id, _, _ in driver.log()] == ["1-0", "5-0"]
    assert driver.tokens() == [0, 1, 2, 3, 4]
    assert driver.status().num_tokens == 5


def test_a_repeated_emit_is_ok_and_changes_nothing(driver: QueueDriver) -> None:
    """A retry of an applied chunk is acknowledged, also after later chunks, and stored once."""
    driver.enqueue()
    grant = driver.grant()
    driver.emit(grant, 0, 3)
    assert driver.emit(grant, 0, 3) == EmitReply(EmitOutcome.OK, 3)
    driver.emit(grant, 3, 2)
    assert driver.emit(grant, 0, 3) == EmitReply(EmitOutcome.OK, 5)
    assert driver.tokens() == [0, 1, 2, 3, 4]


def test_a_repeated_emit_is_not_charged_again(driver: QueueDriver) -> None:
    """Fair shares count what is in the log."""
    driver.enqueue()
    grant = driver.grant()
    driver.emit(grant, 0, 3)
    charged = driver.client.zscore(driver.keys.served(5), "acme")
    driver.emit(grant, 0, 3)
    assert driver.client.zscore(driver.keys.served(5), "acme") == charged


def test_a_chunk_that_comes_too_early_is_a_gap(driver: QueueDriver) -> None:
    """Reordered chunks are refused with the offset to go on from; then the order is right."""
    driver.enqueue()
    grant = driver.grant()
    assert driver.emit(grant, 2, 2) == EmitReply(EmitOutcome.GAP, 0)
    driver.emit(grant, 0, 2)
    assert driver.emit(grant, 2, 2) == EmitReply(EmitOutcome.OK, 4)
    assert driver.tokens() == [0, 1, 2, 3]


@pytest.mark.parametrize(("offset", "num_tokens"), [(1, 1), (2, 5), (0, 2)])
def test_a_chunk_cut_elsewhere_is_an_overlap(
    driver: QueueDriver, offset: int, num_tokens: int
) -> None:
    """A chunk that covers known tokens under other bounds is refused with the log's length."""
    driver.enqueue()
    grant = driver.grant()
    driver.emit(grant, 0, 3)
    assert driver.emit(grant, offset, num_tokens) == EmitReply(EmitOutcome.OVERLAP, 3)
    assert driver.tokens() == [0, 1, 2]


def test_a_worker_that_was_taken_over_is_fenced(driver: QueueDriver) -> None:
    """After a new grant, the old epoch is refused and the new one goes on."""
    driver.enqueue()
    old = driver.grant("w1")
    driver.emit(old, 0, 2)
    driver.let_leases_lapse()
    new = driver.grant("w2")
    assert new.num_tokens == 2
    assert driver.emit(old, 2, 1, "w1") == EmitReply(EmitOutcome.FENCED, 2)
    assert driver.emit(new, 2, 2, "w2") == EmitReply(EmitOutcome.OK, 4)


def test_a_released_request_takes_no_tokens(driver: QueueDriver) -> None:
    """Between two holders nobody writes, not even the last one."""
    driver.enqueue()
    grant = driver.grant()
    driver.release(grant)
    assert driver.emit(grant).outcome is EmitOutcome.FENCED


def test_another_worker_at_the_right_epoch_is_fenced(driver: QueueDriver) -> None:
    """The epoch alone does not make a holder."""
    driver.enqueue()
    grant = driver.grant("w1")
    assert driver.emit(grant, worker_id="w2").outcome is EmitOutcome.FENCED


def test_an_epoch_from_the_future_is_fenced(driver: QueueDriver) -> None:
    """An epoch that was never granted writes nothing."""
    driver.enqueue()
    grant = driver.grant()
    assert driver.emit(replace(grant, epoch=2)).outcome is EmitOutcome.FENCED


def test_a_finished_request_takes_no_tokens(driver: QueueDriver) -> None:
    """After the terminal entry nothing is appended."""
    driver.enqueue()
    grant = driver.grant()
    driver.finish(grant)
    assert driver.emit(grant) == EmitReply(EmitOutcome.DONE, 0)


def test_an_unknown_request_is_gone(driver: QueueDriver, client: Redis) -> None:
    """A worker that still runs a forgotten request learns it."""
    driver.enqueue()
    grant = driver.grant()
    client.flushall()
    assert driver.emit(grant) == EmitReply(EmitOutcome.GONE, 0)
    assert client.dbsize() == 0


def test_a_cancelled_request_is_told_with_the_next_emit(driver: QueueDriver) -> None:
    """The chunk is in the log, and the holder knows that it must stop."""
    driver.enqueue()
    grant = driver.grant()
    driver.cancel()
    assert driver.emit(grant, 0, 2) == EmitReply(EmitOutcome.CANCEL, 2)
    assert driver.emit(grant, 0, 2) == EmitReply(EmitOutcome.CANCEL, 2)
    assert driver.tokens() == [0, 1]


def test_one_call_serves_many_requests_each_with_its_own_answer(driver: QueueDriver) -> None:
    """Replies come in the order of the items, and one refusal does not touch the others."""
    for number in range(3):
        driver.enqueue(f"r{number}")
    first, second, third = driver.claim().grants
    items = [chunk_of(first, 0, 2), chunk_of(second, 7, 1), chunk_of(third, 0, 1)]
    replies = driver.emit_all([*items, chunk_of(first, 2, 1)])
    outcomes = [reply.outcome for reply in replies]
    assert outcomes == [EmitOutcome.OK, EmitOutcome.GAP, EmitOutcome.OK, EmitOutcome.OK]
    assert [driver.tokens(f"r{number}") for number in range(3)] == [[0, 1, 2], [], [0]]


def test_an_unusable_log_does_not_stop_the_batch(driver: QueueDriver, client: Redis) -> None:
    """One destroyed log is reported gone; its neighbours get their tokens, once, retry or not."""
    for number in range(3):
        driver.enqueue(f"r{number}")
    grants = driver.claim().grants
    client.set(driver.keys.token_log("acme", "r1"), "no stream")
    items = [chunk_of(grant, 0, 2) for grant in grants]
    for _ in range(2):
        outcomes = [reply.outcome for reply in driver.emit_all(items)]
        assert outcomes == [EmitOutcome.OK, EmitOutcome.GONE, EmitOutcome.OK]
    assert driver.tokens("r0") == driver.tokens("r2") == [0, 1]
    client.delete(driver.keys.token_log("acme", "r1"))


def test_a_big_batch_goes_in_one_call(driver: QueueDriver) -> None:
    """Nothing is unpacked onto a stack that could overflow."""
    driver.enqueue()
    grant = driver.grant()
    replies = driver.emit_all([chunk_of(grant, offset, 1) for offset in range(5000)])
    assert replies[-1] == EmitReply(EmitOutcome.OK, 5000)


@pytest.mark.parametrize(
    "change", [{"num_tokens": 0}, {"offset": -1}, {"epoch": 0}, {"num_tokens": "many"}]
)
def test_a_bad_item_is_refused_before_the_first_write(
    driver: QueueDriver, change: dict[str, int]
) -> None:
    """A batch with a malformed item writes none of its items."""
    driver.enqueue()
    grant = driver.grant()
    good, bad = chunk_of(grant, 0, 1), replace(chunk_of(grant, 1, 1), **change)
    with pytest.raises(TransportError, match=next(iter(change))):
        driver.emit_all([good, bad])
    assert driver.tokens() == []


@pytest.mark.parametrize(
    "packed",
    [b"\xc1", b"\x93\x01", msgpack.packb("text"), msgpack.packb(["acme", "r", 1, 0, 1, 7]), b""],
)
def test_items_that_cannot_be_read_are_refused(
    driver: QueueDriver, client: Redis, packed: bytes
) -> None:
    """What is no packed list of whole items is an error of the call, and nothing is written."""
    driver.enqueue("r")
    driver.grant()
    with pytest.raises(ResponseError, match="headrace"):
        client.fcall(f"{functions.LIBRARY}_emit", 1, driver.keys.base, "w1", packed)
    assert driver.tokens("r") == []


def test_each_tenant_pays_for_its_own_tokens(driver: QueueDriver, client: Redis) -> None:
    """One call charges every tenant for all that it appended for it, and for nothing else."""
    for tenant, request_id in (("acme", "a1"), ("acme", "a2"), ("other", "o1")):
        driver.enqueue(request_id, tenant=tenant)
    grants = driver.claim().grants
    before = dict(client.zrange(driver.keys.served(5), 0, -1, withscores=True))
    driver.emit_all([chunk_of(grant, 0, 3) for grant in grants])
    after = dict(client.zrange(driver.keys.served(5), 0, -1, withscores=True))
    assert {name: after[name] - before[name] for name in after} == {b"acme": 6, b"other": 3}


def test_each_priority_has_its_own_books(driver: QueueDriver, client: Redis) -> None:
    """A tenant pays for a chunk at the priority of its request."""
    for request_id, priority in (("now", 0), ("later", 9), ("too", 9)):
        driver.enqueue(request_id, priority=priority)
    grants = driver.claim().grants
    before = {lane: client.zscore(driver.keys.served(lane), "acme") for lane in (0, 9)}
    driver.emit_all([chunk_of(grant, 0, 2) for grant in grants])
    after = {lane: client.zscore(driver.keys.served(lane), "acme") for lane in (0, 9)}
    assert {lane: after[lane] - before[lane] for lane in after} == {0: 2, 9: 4}


def test_spoiled_books_cost_nobody_a_token(driver: QueueDriver, client: Redis) -> None:
    """With books of the wrong type, chunks are appended and acknowledged all the same."""
    for request_id, priority in (("spoiled", 3), ("sound", 5)):
        driver.enqueue(request_id, priority=priority)
    grants = driver.claim().grants
    before = client.zscore(driver.keys.served(5), "acme")
    client.set(driver.keys.served(3), "no sorted set")
    replies = driver.emit_all([chunk_of(grant, 0, 2) for grant in grants])
    assert replies == (EmitReply(EmitOutcome.OK, 2),) * 2
    assert driver.tokens("spoiled") == driver.tokens("sound") == [0, 1]
    assert client.zscore(driver.keys.served(5), "acme") == before + 2
    client.delete(driver.keys.served(3))


def test_a_request_of_many_grants_takes_tokens(driver: QueueDriver) -> None:
    """Epochs of more than one digit fence as those of one."""
    driver.enqueue()
    old = driver.grant()
    for _ in range(12):
        driver.release(old)
        old, grant = driver.grant(), old
    assert old.epoch == 13
    assert driver.emit(replace(old, epoch=1)).outcome is EmitOutcome.FENCED
    assert driver.emit(grant).outcome is EmitOutcome.FENCED
    assert driver.emit(old, 0, 12) == EmitReply(EmitOutcome.OK, 12)
    assert driver.emit(old, 12, 1) == EmitReply(EmitOutcome.OK, 13)


@pytest.mark.parametrize("value", ["01x", "1.5", "-1", "", " 1", "0x1", "9" * 15])
def test_a_length_written_by_hand_takes_no_tokens(
    driver: QueueDriver, client: Redis, value: str
) -> None:
    """What is no count of tokens ends the request for its holder, and the batch goes on."""
    for request_id in ("damaged", "good"):
        driver.enqueue(request_id)
    grants = driver.claim().grants
    client.hset(driver.keys.request("acme", "damaged"), "num_tokens", value)
    replies = driver.emit_all([chunk_of(grant, 0, 1) for grant in grants])
    assert replies == (EmitReply(EmitOutcome.GONE, 0), EmitReply(EmitOutcome.OK, 1))
    assert driver.log("damaged") == []
    client.hset(driver.keys.request("acme", "damaged"), "num_tokens", 0)


def test_answers_name_their_places(driver: QueueDriver) -> None:
    """Between chunks that are appended, each exception is told for its own."""
    for number in range(7):
        driver.enqueue(f"r{number}")
    grants = driver.claim().grants
    driver.cancel("r1")
    driver.finish_now("r3")
    driver.finish(grants[5])
    items = [chunk_of(grant, 0, 2) for grant in grants]
    outcomes = [reply.outcome.name for reply in driver.emit_all(items)]
    assert outcomes == ["OK", "CANCEL", "OK", "FINISH", "OK", "DONE", "OK"]
    assert [reply.outcome.name for reply in driver.emit_all(items)] == outcomes

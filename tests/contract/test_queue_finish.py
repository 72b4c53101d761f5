"""finish: a request ends once, and its result is kept for as long as was asked."""

from __future__ import annotations

import pytest
from redis import Redis

from headrace.errors import TransportError
from headrace.functions import FinishOutcome, FinishReply
from headrace.types import FinishReason, RequestState
from support.queue_driver import QueueDriver
from support.queue_invariants import check_empty
from support.waiting import eventually


@pytest.mark.parametrize(
    "state", [RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED]
)
def test_a_request_ends_with_one_terminal_entry(driver: QueueDriver, state: RequestState) -> None:
    """The entry comes last, under the number of tokens; nothing of the work is left."""
    driver.enqueue()
    grant = driver.grant()
    driver.emit(grant, 0, 3)
    assert driver.finish(grant, 3, state=state) == FinishReply(FinishOutcome.OK, 3)
    assert [entry_id for entry_id, _, _ in driver.log()] == ["3-0", "3-1"]
    assert driver.end().finish_reason is FinishReason.STOP
    assert (driver.status().state, driver.status().owner) == (state, None)
    check_empty(driver.client, driver.keys)


def test_a_repeated_finish_is_ok(driver: QueueDriver) -> None:
    """A retry after a lost reply is acknowledged and writes nothing."""
    driver.enqueue()
    grant = driver.grant()
    for _ in range(3):
        assert driver.finish(grant).outcome is FinishOutcome.OK
    assert len(driver.log()) == 1


def test_a_request_without_tokens_can_end(driver: QueueDriver) -> None:
    """The terminal entry of an empty answer has id 0-1."""
    driver.enqueue()
    driver.finish(driver.grant())
    assert [entry_id for entry_id, _, _ in driver.log()] == ["0-1"]


@pytest.mark.parametrize("told", [1, 3])
def test_a_finish_with_another_count_is_a_gap(driver: QueueDriver, told: int) -> None:
    """An end that does not meet the log is refused with the log's length, and nothing ends."""
    driver.enqueue()
    grant = driver.grant()
    driver.emit(grant, 0, 2)
    assert driver.finish(grant, told) == FinishReply(FinishOutcome.GAP, 2)
    assert driver.status().state is RequestState.RUNNING


def test_a_late_finish_after_a_takeover_is_refused(driver: QueueDriver) -> None:
    """Of two workers that complete a request, the holder alone is accepted."""
    driver.enqueue()
    old = driver.grant("w1")
    driver.let_leases_lapse()
    new = driver.grant("w2")
    assert driver.finish(old, worker_id="w1").outcome is FinishOutcome.FENCED
    assert driver.finish(new, worker_id="w2").outcome is FinishOutcome.OK
    assert driver.finish(old, worker_id="w1").outcome is FinishOutcome.DONE
    assert driver.end().worker_id == "w2"


def test_a_finish_after_the_deadline_is_refused(driver: QueueDriver) -> None:
    """What the queue has ended, no worker ends again."""
    driver.enqueue(ttl_ms=60_000)
    grant = driver.grant()
    driver.let_deadline_pass()
    assert driver.reap().expired
    assert driver.finish(grant).outcome is FinishOutcome.DONE


def test_an_unknown_request_cannot_finish(driver: QueueDriver, client: Redis) -> None:
    """A forgotten request is gone, and finishing it writes nothing."""
    driver.enqueue()
    grant = driver.grant()
    client.flushall()
    assert driver.finish(grant) == FinishReply(FinishOutcome.GONE, 0)
    assert client.dbsize() == 0


def test_the_result_is_kept_from_the_end_on(driver: QueueDriver, client: Redis) -> None:
    """The TTL starts at the end, not at the enqueue, and the tombstone outlives the log."""
    driver.enqueue(result_ttl_ms=600_000)
    grant = driver.grant()
    driver.emit(grant)
    log, request = driver.keys.token_log("acme", "r1"), driver.keys.request("acme", "r1")
    assert (client.pttl(log), client.pttl(request)) == (-1, -1)
    driver.finish(grant, 1)
    assert 540_000 < client.pttl(log) <= 600_000
    assert 2_340_000 < client.pttl(request) <= 2_400_000


def test_a_result_outlived_by_its_tombstone_is_known_to_be_expired(driver: QueueDriver) -> None:
    """For a while the queue tells "its result is gone" from "never heard of it"."""
    driver.enqueue()
    driver.finish(driver.grant())
    log = driver.keys.token_log("acme", "r1")
    driver.client.pexpire(log, 1)  # the tombstone has its own time, which the test above measures
    eventually(lambda: not driver.client.exists(log))
    assert driver.status().state is RequestState.FINISHED
    driver.client.delete(driver.keys.request("acme", "r1"))


def test_the_payload_is_dropped_at_the_end(driver: QueueDriver, client: Redis) -> None:
    """A prompt is not kept for longer than it is needed."""
    driver.enqueue(payload=b"secret")
    assert driver.depth().payload_bytes == 6
    driver.finish(driver.grant())
    assert client.hget(driver.keys.request("acme", "r1"), "payload") is None
    assert driver.depth().payload_bytes == 0


def test_a_destroyed_log_does_not_keep_a_request_from_ending(
    driver: QueueDriver, client: Redis
) -> None:
    """The terminal entry is written even where somebody put another type in the log's place."""
    driver.enqueue()
    grant = driver.grant()
    client.set(driver.keys.token_log("acme", "r1"), "no stream")
    assert driver.finish(grant).outcome is FinishOutcome.OK
    assert driver.end().finish_reason is FinishReason.STOP


@pytest.mark.parametrize("state", [RequestState.QUEUED, RequestState.RUNNING])
def test_a_state_that_is_no_end_is_refused(driver: QueueDriver, state: RequestState) -> None:
    """Only terminal states end a request."""
    driver.enqueue()
    grant = driver.grant()
    with pytest.raises(TransportError, match=state.value):
        driver.finish(grant, state=state)
    assert driver.status().state is RequestState.RUNNING


def test_thousands_of_requests_leave_nothing_but_results(driver: QueueDriver) -> None:
    """Lanes, pending entries, consumers and counters are gone when the work is."""
    for number in range(400):
        driver.enqueue(f"r{number}", tenant=f"t{number % 5}", priority=number % 10, result_ttl_ms=1)
    while grants := driver.claim(f"w{driver.depth().queued % 3}").grants:
        for grant in grants:
            driver.finish(
                grant, worker_id=driver.status(grant.request_id, grant.tenant).owner or ""
            )
    check_empty(driver.client, driver.keys)
    left = {"stats", "wake"}
    eventually(lambda: _kinds(driver) <= left | {"worker"})


def _kinds(driver: QueueDriver) -> set[str]:
    return {key.decode().split(":")[1] for key in driver.client.scan_iter(count=10_000)}

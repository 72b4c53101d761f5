"""What others write into the queue by hand stops neither its functions nor its requests."""

from __future__ import annotations

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from headrace.errors import ErrorCode
from headrace.functions import EmitOutcome, Grant
from headrace.types import RequestState
from support.queue_driver import QueueDriver
from support.waiting import eventually

ENTRIES = {
    "textbook": {"payload": "tell me a joke"},
    "no-hash": {"r": "ghost"},
    "size-of-text": {"r": "ghost", "c": "1", "b": "abc"},
    "size-beyond-integers": {"r": "ghost", "c": "1", "b": "1e300"},
    "negative-size": {"r": "ghost", "c": "1", "b": "-5"},
    "id-of-a-mebibyte": {"r": "x" * 2**20, "c": "1", "b": "0"},
    "id-that-is-no-text": {"r": b"\xff\xfe", "c": "1", "b": "0"},
}
FIELDS = ("cost", "epoch", "num_tokens", "lane", "strikes", "result_ttl_ms", "enqueued_ms", "entry")


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_added_by_hand_holds_up_nobody(
    driver: QueueDriver, client: Redis, entry: dict[str, bytes | str]
) -> None:
    """A raw XADD into a lane is dropped, and the counts, which never knew it, stay true."""
    driver.enqueue("before")
    client.xadd(driver.keys.lane(5, "acme"), entry)
    driver.enqueue("behind")
    assert _claimed(driver) == ["before", "behind"]
    assert driver.depth().running == 2


def test_entries_added_by_hand_do_not_pile_up(driver: QueueDriver, client: Redis) -> None:
    """A lane that held only strays besides its requests goes away with these."""
    driver.enqueue("before")
    for _ in range(20):
        client.xadd(driver.keys.lane(5, "acme"), {"payload": "x" * 1000})
    driver.enqueue("behind")
    for grant in driver.claim().grants:
        driver.finish(grant)
    assert not client.exists(driver.keys.lane(5, "acme"))


@pytest.mark.parametrize("field", FIELDS)
def test_a_request_that_lost_a_field_is_reported_lost(
    driver: QueueDriver, client: Redis, field: str
) -> None:
    """Its readers are told, and the requests behind it are served."""
    driver.enqueue("damaged")
    driver.enqueue("good")
    client.hdel(driver.keys.request("acme", "damaged"), field)
    assert _claimed(driver) == ["good"]
    assert driver.end("damaged").error_code is ErrorCode.LOST


@pytest.mark.parametrize("value", ["1.5", "1e3", "-1", "many", "9" * 30])
def test_a_number_that_is_none_makes_no_function_stumble(
    driver: QueueDriver, client: Redis, value: str
) -> None:
    """Claims, sweeps and the janitor pass over a hash whose epoch is no count."""
    driver.enqueue("damaged", ttl_ms=60_000)
    driver.enqueue("good")
    client.hset(driver.keys.request("acme", "damaged"), "epoch", value)
    driver.janitor()
    assert _claimed(driver) == ["good"]
    driver.reap()
    assert driver.depth().queued == 0


def test_a_running_request_that_lost_a_field_is_gone_for_its_holder(
    driver: QueueDriver, client: Redis
) -> None:
    """The holder drops it, and the sweep closes it."""
    driver.enqueue()
    grant = driver.grant()
    client.hdel(driver.keys.request("acme", "r1"), "num_tokens")
    assert driver.emit(grant).outcome is EmitOutcome.GONE
    driver.let_leases_lapse()
    assert driver.end().error_code is ErrorCode.LOST


def test_a_hash_of_the_wrong_type_holds_up_nobody(driver: QueueDriver, client: Redis) -> None:
    """A string in the place of a request is as good as no request."""
    driver.enqueue("damaged")
    driver.enqueue("good")
    client.set(driver.keys.request("acme", "damaged"), "no hash")
    assert _claimed(driver) == ["good"]
    assert driver.end("damaged").error_code is ErrorCode.LOST


def test_a_request_without_its_payload_is_still_granted(driver: QueueDriver, client: Redis) -> None:
    """The worker gets nothing to decode, and answers so."""
    driver.enqueue(payload=b"")
    client.hdel(driver.keys.request("acme", "r1"), "payload")
    assert driver.grant().payload == b""


def test_a_request_that_claims_another_lane_is_dropped_there(
    driver: QueueDriver, client: Redis
) -> None:
    """An entry belongs to the lane that it is in; the requests behind it are served."""
    driver.enqueue("damaged")
    driver.enqueue("good")
    client.hset(driver.keys.request("acme", "damaged"), "lane", 3)
    assert _claimed(driver) == ["good"]
    client.hset(driver.keys.request("acme", "damaged"), "lane", 5)
    driver.janitor()
    assert _claimed(driver) == ["damaged"]


def test_a_deadline_of_nothing_does_not_stop_the_sweep(driver: QueueDriver, client: Redis) -> None:
    """A raw member of the deadlines is thrown away; real deadlines are kept."""
    client.zadd(driver.keys.deadlines, {"garbage": 1})
    driver.enqueue(ttl_ms=1)
    eventually(lambda: driver.reap().expired)
    assert driver.status().state is RequestState.FAILED
    assert client.zcard(driver.keys.deadlines) == 0


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a b", b"line\nbreak", b"x" * 161, b"{other}"])
def test_a_name_that_nobody_can_print_is_refused(
    driver: QueueDriver, client: Redis, name: bytes
) -> None:
    """Other clients than ours keep to the same names, or every worker would stumble over them."""
    driver.depth()  # loads the library
    args = ("acme", name, b"payload", 1, 5, "", "", 1000, "", 1)
    with pytest.raises(ResponseError, match="bad request id"):
        client.fcall("headrace_1_enqueue", 1, driver.keys.base, *args)
    assert driver.depth().queued == 0


def test_one_claim_does_not_carry_more_than_a_few_payloads_of_full_size(
    driver: QueueDriver,
) -> None:
    """Many big prompts come in several replies, the next one at once."""
    for number in range(12):
        driver.enqueue(f"r{number}", payload=b"x" * 2**21, cost=1)
    first = driver.claim(free_seqs=12)
    assert (len(first.grants), first.wake_cursor) == (4, "0-0")
    assert len(driver.claim(free_seqs=12).grants) == 4
    _finish_all(driver, first.grants)


def _claimed(driver: QueueDriver) -> list[str]:
    """Claim one by one, more often than there are requests."""
    return [grant.request_id for _ in range(6) for grant in driver.claim(free_seqs=1).grants]


def _finish_all(driver: QueueDriver, grants: tuple[Grant, ...]) -> None:
    for grant in grants:
        driver.finish(grant)

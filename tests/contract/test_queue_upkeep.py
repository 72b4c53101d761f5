"""heartbeat and janitor: nothing piles up, and what was removed by hand is put right."""

from __future__ import annotations

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from headrace.errors import TransportError
from headrace.functions import heartbeat
from headrace.keys import GROUP
from headrace.types import RequestState
from support.queue_driver import QueueDriver


def test_a_heartbeat_is_seen_until_it_ends(driver: QueueDriver, client: Redis) -> None:
    """What a worker tells of itself has a TTL, so a dead worker is not listed for ever."""
    info = {"free_blocks": 7, "model": "tiny"}
    driver.run(heartbeat(driver.keys, worker_id="w1", info=info, ttl_ms=600_000))
    told = client.hgetall(driver.keys.worker("w1"))
    assert (told[b"free_blocks"], told[b"model"]) == (b"7", b"tiny")
    assert 540_000 < client.pttl(driver.keys.worker("w1")) <= 600_000
    assert client.zrange(driver.keys.workers, 0, -1) == [b"w1"]


def test_a_heartbeat_keeps_the_answer_of_the_last_claim(driver: QueueDriver) -> None:
    """A claim can be repeated although a heartbeat came between."""
    driver.enqueue()
    first = driver.claim(nonce="n").grants
    driver.heartbeat("w1")
    assert [g.held for g in driver.claim(nonce="n").grants] == [g.held for g in first]


def test_a_heartbeat_cannot_write_the_fields_of_the_queue(driver: QueueDriver) -> None:
    """Names with a leading underscore are refused."""
    call = heartbeat(driver.keys, worker_id="w1", info={"_nonce": "x"}, ttl_ms=5000)
    with pytest.raises(TransportError, match="_nonce"):
        driver.run(call)


def test_a_heartbeat_that_is_cut_short_writes_nothing(driver: QueueDriver, client: Redis) -> None:
    """A field without a value is refused before the first write."""
    with pytest.raises(ResponseError, match="has no value"):
        client.fcall("headrace_1_heartbeat", 1, driver.keys.base, "w1", 5000, "model")
    assert not client.exists(driver.keys.worker("w1"))


def test_the_janitor_forgets_workers_without_a_heartbeat(
    driver: QueueDriver, client: Redis
) -> None:
    """The list of workers is that of the living."""
    driver.heartbeat("dead")
    driver.heartbeat("alive")
    client.delete(driver.keys.worker("dead"))  # as its TTL would
    assert driver.janitor() == 1
    assert client.zrange(driver.keys.workers, 0, -1) == [b"alive"]


def test_consumers_of_dead_workers_do_not_pile_up(driver: QueueDriver, client: Redis) -> None:
    """After many restarts, a lane has consumers for those that live or hold something."""
    driver.enqueue("long")
    driver.grant("alive")
    driver.heartbeat("alive")
    for number in range(60):
        driver.enqueue(f"r{number}")
        grant = driver.grant(f"restart{number}")
        driver.finish(grant, worker_id=f"restart{number}")
        client.delete(driver.keys.worker(f"restart{number}"))
    assert driver.janitor() == 60
    assert _consumers(driver) == {b"alive", b"_requeued"}


def test_a_consumer_with_pending_entries_is_kept(driver: QueueDriver, client: Redis) -> None:
    """Deleting it would lose what it holds; the reaper recovers the request first."""
    driver.enqueue()
    driver.grant("dead")
    client.delete(driver.keys.worker("dead"))
    driver.janitor()
    assert b"dead" in _consumers(driver)
    driver.let_leases_lapse()
    driver.janitor()
    assert _consumers(driver) == {b"_requeued"}
    assert driver.grant("w2").epoch == 2


def test_a_queued_request_without_its_entry_is_put_back(driver: QueueDriver, client: Redis) -> None:
    """A raw XDEL makes a request invisible for a while, not for ever; others are served at once."""
    driver.enqueue("hidden")
    driver.enqueue("good")
    lane = driver.keys.lane(5, "acme")
    client.xdel(lane, driver.client.hget(driver.keys.request("acme", "hidden"), "entry"))
    assert driver.grant().request_id == "good"
    assert driver.janitor() == 1
    assert driver.grant().request_id == "hidden"


def test_a_claimed_head_without_its_body_does_not_hide_others(
    driver: QueueDriver, client: Redis
) -> None:
    """An entry deleted while it waits to fit is passed over, and its request comes back."""
    driver.enqueue("hidden")
    driver.enqueue("good")
    driver.claim(free_tokens=1)  # the head has been read, and did not fit
    lane = driver.keys.lane(5, "acme")
    client.xdel(lane, driver.client.hget(driver.keys.request("acme", "hidden"), "entry"))
    assert [grant.request_id for grant in driver.claim().grants] == ["good"]
    driver.janitor()
    assert driver.grant().request_id == "hidden"


def test_a_lane_deleted_by_hand_is_rebuilt(driver: QueueDriver, client: Redis) -> None:
    """Requests that wait and requests that run survive the loss of their stream."""
    driver.enqueue("running")
    grant = driver.grant("w1")
    driver.enqueue("waiting")
    client.delete(driver.keys.lane(5, "acme"))
    assert driver.janitor() == 2
    assert driver.status("running").owner == "w1"
    assert driver.emit(grant).offset == 1
    assert driver.grant("w2").request_id == "waiting"
    driver.finish(grant, 1)
    assert driver.status("running").state is RequestState.FINISHED


def test_a_running_request_acknowledged_by_a_stranger_is_not_stuck(
    driver: QueueDriver, client: Redis
) -> None:
    """A raw XACK takes the lease away; when the holder is gone too, the next worker goes on."""
    driver.enqueue()
    driver.grant("gone")
    _acknowledge(driver, "r1")
    assert driver.janitor() == 1
    driver.let_leases_lapse()
    assert driver.grant("w2").epoch == 2


def test_a_waiting_head_acknowledged_by_a_stranger_is_not_stuck(driver: QueueDriver) -> None:
    """A head that did not fit is pending; a raw XACK hides it until the janitor comes."""
    driver.enqueue("head")
    driver.enqueue("behind")
    driver.claim(free_tokens=1)
    _acknowledge(driver, "head")
    assert driver.janitor() == 1
    assert [grant.request_id for grant in driver.claim().grants] == ["head", "behind"]


def test_a_lane_whose_group_and_holder_are_gone_is_not_stuck(
    driver: QueueDriver, client: Redis
) -> None:
    """Without a waiting request no claim looks into the lane; the janitor does."""
    driver.enqueue()
    driver.grant("gone")
    client.xgroup_destroy(driver.keys.lane(5, "acme"), GROUP)
    assert driver.janitor() == 1
    driver.let_leases_lapse()
    assert driver.grant("w2").epoch == 2


def test_tenants_without_a_place_in_their_lane_are_put_back(
    driver: QueueDriver, client: Redis
) -> None:
    """Requests are served although the list of tenants was deleted by hand."""
    driver.enqueue()
    client.delete(driver.keys.served(5))
    assert driver.janitor() == 1
    assert driver.grant().request_id == "r1"


def test_requests_are_counted_again_when_the_counts_are_gone(
    driver: QueueDriver, client: Redis
) -> None:
    """Deleted counts hide requests for a while, not for ever."""
    for number in range(3):
        driver.enqueue(f"r{number}", payload=b"")
    driver.grant()
    client.delete(driver.keys.stats)
    assert driver.janitor() > 0
    assert (driver.depth().queued, driver.depth().running) == (2, 1)
    assert len(driver.claim().grants) == 2


def test_the_janitor_finds_nothing_in_a_healthy_queue(driver: QueueDriver) -> None:
    """Live requests and live workers are left as they are."""
    for number in range(20):
        driver.enqueue(f"r{number}", tenant=f"t{number % 3}")
    driver.heartbeat("w1")
    driver.claim("w1")
    assert [driver.janitor() for _ in range(3)] == [0, 0, 0]


def test_the_janitor_works_in_small_bites(driver: QueueDriver, client: Redis) -> None:
    """Bounded calls get round to every request in the end."""
    for number in range(50):
        driver.enqueue(f"r{number}")
    client.delete(driver.keys.lane(5, "acme"))
    repaired = [driver.janitor(count=5) for _ in range(60)]
    assert sum(repaired) >= 50
    assert max(repaired) < 50
    assert driver.depth().queued == 50


def test_other_keys_of_the_same_server_are_left_alone(driver: QueueDriver, client: Redis) -> None:
    """A queue shares its Redis with strangers and with other queues."""
    client.set("stranger", "1", ex=60)
    client.hset("{other}:req:acme:r1", mapping={"state": "queued", "entry": "1-0"})
    driver.enqueue()
    assert driver.janitor() == 0
    assert not client.exists("{other}:in:5:acme")
    client.delete("{other}:req:acme:r1")


def _acknowledge(driver: QueueDriver, request_id: str) -> None:
    entry = driver.client.hget(driver.keys.request("acme", request_id), "entry")
    assert driver.client.xack(driver.keys.lane(5, "acme"), GROUP, entry) == 1


def _consumers(driver: QueueDriver) -> set[bytes]:
    return {c["name"] for c in driver.client.xinfo_consumers(driver.keys.lane(5, "acme"), GROUP)}

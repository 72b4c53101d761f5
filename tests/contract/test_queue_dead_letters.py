"""Dead letters: listed, played again, thrown away."""

from __future__ import annotations

from redis import Redis

from headrace.functions import (
    DeadLetter,
    EmitOutcome,
    EnqueueOutcome,
    FinishOutcome,
    list_dead,
    purge_dead,
    replay_dead,
)
from headrace.types import RequestState
from support.queue_driver import QueueDriver


def test_a_dead_letter_tells_what_happened(driver: QueueDriver) -> None:
    """It names request, reason, strikes and the last worker."""
    _bury(driver, "poison", payload=b"1234")
    (letter,) = _letters(driver)
    assert (letter.tenant, letter.request_id, letter.strikes) == ("acme", "poison", 3)
    assert (letter.worker_id, letter.payload_bytes) == ("w1", 4)
    assert "alone" in letter.reason


def test_dead_letters_are_listed_in_pages(driver: QueueDriver) -> None:
    """Oldest first, from an entry on."""
    for number in range(3):
        _bury(driver, f"p{number}")
    first, second = driver.run(list_dead(driver.keys, count=2))
    rest = driver.run(list_dead(driver.keys, count=2, start=f"({second.entry_id}"))
    assert [letter.request_id for letter in (first, second, *rest)] == ["p0", "p1", "p2"]


def test_a_replayed_dead_letter_runs_again_from_the_start(driver: QueueDriver) -> None:
    """It is queued under its id with its payload, no strikes, an empty log; epochs go on."""
    _bury(driver, "poison", payload=b"body", cost=7, priority=2)
    (letter,) = _letters(driver)
    assert driver.run(replay_dead(driver.keys, entry_id=letter.entry_id))
    assert _letters(driver) == ()
    grant = driver.grant()
    assert (grant.request_id, grant.payload, grant.cost) == ("poison", b"body", 7)
    assert (grant.priority, grant.strikes, grant.num_tokens, grant.epoch) == (2, 0, 0, 4)
    driver.emit(grant, 0, 1)
    driver.finish(grant, 1)
    assert driver.status("poison").state is RequestState.FINISHED


def test_a_late_write_from_before_a_replay_is_refused(driver: QueueDriver) -> None:
    """Though the same worker holds the request again, its first life's epochs are over."""
    driver.enqueue("poison")
    stale = driver.grant()
    driver.die(stale)
    for _ in range(2):
        driver.die(driver.grant())
    driver.run(replay_dead(driver.keys, entry_id=_letters(driver)[0].entry_id))
    driver.grant()
    assert driver.emit(stale).outcome is EmitOutcome.FENCED
    assert driver.finish(stale).outcome is FinishOutcome.FENCED


def test_a_replay_does_not_displace_another_dead_letter(driver: QueueDriver, client: Redis) -> None:
    """Of two letters with one id, the older is not played while the younger is being read."""
    _bury(driver, "poison")
    client.delete(driver.keys.request("acme", "poison"))  # as its TTL would
    _bury(driver, "poison", payload=b"other")
    older, younger = _letters(driver)
    assert not driver.run(replay_dead(driver.keys, entry_id=older.entry_id))
    assert driver.run(replay_dead(driver.keys, entry_id=younger.entry_id))
    assert driver.grant().payload == b"other"


def test_a_replay_is_done_once(driver: QueueDriver) -> None:
    """The second replay of a letter finds nothing."""
    _bury(driver, "poison")
    (letter,) = _letters(driver)
    replay = replay_dead(driver.keys, entry_id=letter.entry_id)
    assert (driver.run(replay), driver.run(replay)) == (True, False)
    assert driver.depth().queued == 1


def test_a_replayed_request_is_still_the_one_that_was_enqueued(driver: QueueDriver) -> None:
    """A retry of the first enqueue attaches to it."""
    _bury(driver, "poison")
    (letter,) = _letters(driver)
    driver.run(replay_dead(driver.keys, entry_id=letter.entry_id))
    assert driver.enqueue("poison").outcome is EnqueueOutcome.DUPLICATE


def test_a_letter_whose_id_lives_again_is_not_replayed(driver: QueueDriver, client: Redis) -> None:
    """A replay never takes an id away from another request."""
    _bury(driver, "poison")
    (letter,) = _letters(driver)
    client.delete(driver.keys.request("acme", "poison"))
    driver.enqueue("poison", payload=b"other")
    assert not driver.run(replay_dead(driver.keys, entry_id=letter.entry_id))
    assert driver.grant().payload == b"other"


def test_dead_letters_are_purged_by_name_or_altogether(driver: QueueDriver) -> None:
    """Naming none deletes none; leaving names out deletes all."""
    for number in range(3):
        _bury(driver, f"p{number}")
    first = _letters(driver)[0].entry_id
    assert driver.run(purge_dead(driver.keys, entry_ids=[first, first])) == 1
    assert driver.run(purge_dead(driver.keys, entry_ids=[])) == 0
    assert [letter.request_id for letter in _letters(driver)] == ["p1", "p2"]
    assert driver.run(purge_dead(driver.keys)) == 2
    assert _letters(driver) == ()


def test_dead_letters_are_bounded_by_their_bytes(driver: QueueDriver, client: Redis) -> None:
    """Sixty-four MiB of payloads are kept: the oldest give way, and the count stays true."""
    for number in range(36):
        _bury(driver, f"p{number}", payload=bytes([number]) * (2 * 1024 * 1024))
    kept = _letters(driver)
    assert [letter.request_id for letter in kept] == [f"p{number}" for number in range(4, 36)]
    total = sum(letter.payload_bytes for letter in kept)
    assert client.hget(driver.keys.dead_books, "bytes") == str(total).encode()
    client.delete(driver.keys.dead)
    _bury(driver, "again", payload=b"body")
    assert [letter.request_id for letter in _letters(driver)] == ["again"]


def test_replayed_and_purged_letters_give_their_bytes_back(
    driver: QueueDriver, client: Redis
) -> None:
    """With no letter left nothing is counted."""
    for number in range(3):
        _bury(driver, f"p{number}", payload=b"12345678")
    first, second, _ = _letters(driver)
    driver.run(replay_dead(driver.keys, entry_id=first.entry_id))
    assert client.hget(driver.keys.dead_books, "bytes") == b"16"
    driver.run(purge_dead(driver.keys, entry_ids=[second.entry_id]))
    assert client.hget(driver.keys.dead_books, "bytes") == b"8"
    driver.run(purge_dead(driver.keys))
    assert client.hget(driver.keys.dead_books, "bytes") is None


def test_a_queue_without_dead_letters_lists_none(driver: QueueDriver) -> None:
    """Nothing there is no error."""
    assert _letters(driver) == ()
    assert driver.run(purge_dead(driver.keys)) == 0
    assert not driver.run(replay_dead(driver.keys, entry_id="1-0"))


def _letters(driver: QueueDriver) -> tuple[DeadLetter, ...]:
    return driver.run(list_dead(driver.keys))


def _bury(driver: QueueDriver, request_id: str, **options: object) -> None:
    """Let it die alone until it is a dead letter."""
    driver.enqueue(request_id, **options)
    for _ in range(3):
        driver.die(driver.grant())

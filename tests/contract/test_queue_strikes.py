"""Strikes: poison is found within a bounded number of deaths, and bad luck is not taken for it."""

from __future__ import annotations

import pytest
from redis import Redis

from headrace.errors import ErrorCode
from headrace.functions import DeadLetter, list_dead
from headrace.types import RequestState
from support.queue_driver import QueueDriver, chunk_of

ROOM = {"free_seqs": 64, "free_tokens": 10_000, "total_tokens": 10_000}


def test_an_innocent_that_gets_on_survives_a_hundred_kills(driver: QueueDriver) -> None:
    """Worker after worker is killed: it never has a second strike, and is there at the end."""
    driver.enqueue()
    for number in range(100):
        driver.emit(grant := driver.grant(), number * 33, 33)
        assert grant.strikes <= 1
        driver.let_leases_lapse()
    assert driver.status().state is RequestState.QUEUED


def test_an_innocent_that_runs_alone_is_no_dead_letter_after_three_kills(
    driver: QueueDriver,
) -> None:
    """Killed twice before its first token it is a suspect; tokens of the third run clear it."""
    driver.enqueue()
    driver.die(driver.grant())
    driver.die(driver.grant())
    driver.emit(grant := driver.grant(), 0, 1)
    assert grant.strikes == 2
    driver.die(grant)
    assert (driver.status().state, driver.status().strikes) == (RequestState.QUEUED, 1)


def test_poison_of_a_later_token_is_found_at_the_third_death(driver: QueueDriver) -> None:
    """It got on before its first death, and no further afterwards."""
    driver.enqueue()
    driver.emit(grant := driver.grant(), 0, 100)
    driver.die(grant)
    driver.die(driver.grant())
    driver.die(driver.grant())
    assert driver.end().error_code is ErrorCode.DEAD_LETTERED


def test_poison_among_sixty_three_innocents_is_alone_at_its_third_death(
    driver: QueueDriver,
) -> None:
    """Three crashes, one dead letter, and everybody else comes to the end."""
    names = [f"r{number}" for number in range(63)]
    for name in (*names[:30], "poison", *names[30:]):
        driver.enqueue(name)
    num_crashes = _serve(driver, poison="poison", fails_at=2)
    assert num_crashes == 3
    assert [letter.request_id for letter in _letters(driver)] == ["poison"]
    states = {driver.status(name).state for name in names}
    assert states == {RequestState.FINISHED}


def test_who_died_with_the_culprit_alone_is_cleared(driver: QueueDriver) -> None:
    """Once it is buried the others run together again, without strikes, in every lane."""
    for number, lane in enumerate((5, 5, 5, 6)):
        driver.enqueue(f"r{number}", priority=lane)
    for _ in range(2):
        driver.die(*driver.claim().grants)
    driver.die(poison := driver.grant())
    assert driver.status(poison.request_id).error_code == "dead_lettered"
    together = driver.claim("busy", free_tokens=900).grants
    in_other_lane = driver.claim("w1", free_tokens=900).grants
    assert (len(together), len(in_other_lane)) == (2, 1)
    assert {grant.strikes for grant in (*together, *in_other_lane)} == {0}


def test_a_suspect_that_also_died_without_the_culprit_is_not_cleared(driver: QueueDriver) -> None:
    """One death of its own is enough to run alone."""
    driver.enqueue("other", priority=9)
    driver.die(driver.grant())
    driver.enqueue("poison", priority=0)
    driver.die(*driver.claim().grants)
    for _ in range(2):
        driver.die(driver.grant())
    assert [letter.request_id for letter in _letters(driver)] == ["poison"]
    assert driver.claim("busy", free_tokens=900).grants == ()
    assert driver.grant().strikes == 2


def test_a_lapsed_lease_leaves_room_for_tokens_that_were_never_sent(driver: QueueDriver) -> None:
    """Up to 32 tokens beyond the grant clear nothing when nobody told what was made."""
    driver.enqueue()
    for offset, num_tokens, strikes in ((0, 32, 1), (32, 32, 2), (64, 33, 1)):
        driver.emit(driver.grant(), offset, num_tokens)
        driver.let_leases_lapse()
        assert driver.status().strikes == strikes


def test_poison_that_takes_the_worker_down_ends_after_nine_deaths(driver: QueueDriver) -> None:
    """Each time one more token was sent: alone from the third on, buried at the ninth."""
    driver.enqueue()
    deaths = 0
    while not driver.status().state.is_terminal:
        driver.emit(driver.grant(f"w{deaths}"), deaths, 1, f"w{deaths}")
        driver.let_leases_lapse()
        deaths += 1
    assert deaths == 9
    assert [death.was_alone for death in _letters(driver)[0].evidence] == [False] * 2 + [True] * 7


def test_poison_that_gets_on_a_little_each_time_ends_after_ten_deaths(driver: QueueDriver) -> None:
    """Told of by its worker: nine deaths make it a suspect for good, the tenth is alone."""
    driver.enqueue()
    deaths = 0
    while not driver.status().state.is_terminal:
        driver.emit(grant := driver.grant(), deaths, 1)
        driver.die(grant)
        deaths += 1
    assert deaths == 10
    assert _letters(driver)[0].evidence[-1].was_alone


def test_a_long_run_alone_after_many_deaths_is_no_dead_letter(driver: QueueDriver) -> None:
    """With 33 tokens or more in each run it stays a suspect and comes to its end."""
    driver.enqueue()
    for number in range(20):
        driver.emit(grant := driver.grant(), number * 33, 33)
        driver.die(grant)
    driver.enqueue("other")
    assert [grant.request_id for grant in driver.claim().grants] == ["r1"]


def test_a_letter_shows_each_death(driver: QueueDriver) -> None:
    """Worker, epoch, tokens at the grant and at the death, alone or not, when, and the cause."""
    driver.enqueue()
    driver.emit(first := driver.grant("w1"), 0, 2)
    driver.die(first)
    second = driver.grant("w2")
    driver.die(second, worker_id="w2", cause="exited with status 1")
    driver.grant("w3")
    driver.let_leases_lapse()
    one, two, three = _letters(driver)[0].evidence
    assert (one.worker_id, one.epoch, one.granted_tokens, one.num_tokens) == ("w1", 1, 0, 2)
    assert (two.worker_id, two.was_alone, two.cause) == ("w2", False, "exited with status 1")
    assert (three.epoch, three.was_alone, three.cause) == (3, True, "its lease ran out")
    assert one.at_ms <= two.at_ms <= three.at_ms


def test_evidence_that_somebody_overwrote_is_begun_anew(driver: QueueDriver, client: Redis) -> None:
    """Garbage in the hash costs what it replaced, not the request."""
    driver.enqueue()
    driver.die(driver.grant())
    client.hset(driver.keys.request("acme", "r1"), "evidence", b"\xc1")
    driver.die(driver.grant())
    driver.die(driver.grant())
    assert [death.epoch for death in _letters(driver)[0].evidence] == [2, 3]


@pytest.mark.parametrize("told", [True, False])
def test_a_cancelled_suspect_is_cancelled_not_buried(driver: QueueDriver, told: bool) -> None:
    """Whoever wanted it to stop gets that, and no dead letter is left."""
    driver.enqueue()
    driver.die(driver.grant())
    driver.die(driver.grant())
    grant = driver.grant()
    driver.cancel()
    driver.die(grant) if told else driver.let_leases_lapse()
    assert driver.status().state is RequestState.CANCELLED
    assert _letters(driver) == ()


def _serve(driver: QueueDriver, *, poison: str, fails_at: int) -> int:
    """Run what is granted, five tokens each, until nothing is left; return the crashes."""
    num_crashes = 0
    while grants := driver.claim(**ROOM).grants:
        at = next((fails_at - g.num_tokens for g in grants if g.request_id == poison), 5)
        for token in range(at):
            driver.emit_all([chunk_of(grant, grant.num_tokens + token, 1) for grant in grants])
        if at < 5:
            num_crashes += 1
            driver.die(*grants)
        else:
            for grant in grants:
                driver.finish(grant, grant.num_tokens + 5)
    return num_crashes


def _letters(driver: QueueDriver) -> tuple[DeadLetter, ...]:
    return driver.run(list_dead(driver.keys))

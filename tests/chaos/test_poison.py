"""One poison among sixty-three innocents: three crashes, one dead letter, every answer exact."""

from __future__ import annotations

import pytest

from headrace.errors import ErrorCode
from headrace.functions import DeadLetter, list_dead
from support.fake_engine import Misfortune
from support.queue_driver import QueueDriver
from support.streams import Asked, check_stream, enqueue, is_drained, wait_for_ends
from support.waiting import eventually
from support.worker_fixtures import ON_VALKEY
from support.workers import WorkerFarm

WIDE = ("--lease-ttl", "600s", "--max-num-seqs", "64")  # nothing below may wait for a lease


@ON_VALKEY
@pytest.mark.parametrize(
    ("misfortune", "cause"),
    [
        (Misfortune.CRASH, "killed by signal 9"),
        (Misfortune.HANG, "no sign of life within the hang limit"),
        (
            Misfortune.BREAK_ENGINE,
            "EngineStepError: RuntimeError: the prompt asked to break the engine",
        ),
    ],
    ids=["kills", "hangs", "raises"],
)
def test_poison_among_sixty_three_is_the_only_dead_letter(
    driver: QueueDriver, farm: WorkerFarm, misfortune: int, cause: str
) -> None:
    """It dies three times, the last time alone; the letter says of what, and nobody else dies."""
    poison = Asked("poison", prompt=(5, int(misfortune), 3), max_tokens=40)
    asked = enqueue_around(driver, poison)
    # Short only where a hang is waited for: a busy machine must not pass for one.
    hang_limit = "2.5s" if misfortune == Misfortune.HANG else "30s"
    worker = farm.start(*WIDE, "--engine-hang-timeout", hang_limit)
    wait_for_ends(driver, poison, *asked)
    (letter,) = letters(driver)
    assert (letter.request_id, len(letter.evidence)) == ("poison", 3)
    assert [death.was_alone for death in letter.evidence] == [False, False, True]
    assert {death.cause for death in letter.evidence} == {cause}
    assert len(worker.events("engine.step_failed")) == 3
    assert [e["request_id"] for e in worker.wait_for("request.dead_lettered")] == ["poison"]
    for innocent in asked:
        check_stream(driver, innocent)
    assert eventually(lambda: is_drained(driver))


@ON_VALKEY
def test_a_request_that_cannot_be_decoded_takes_nobody_down(
    driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Garbage among sixty-three ends as such; no engine dies, no dead letter is written."""
    driver.enqueue("poison", payload=b"\xc1 is no msgpack")
    asked = enqueue_around(driver, None)
    worker = farm.start(*WIDE)
    wait_for_ends(driver, Asked("poison"), *asked)
    assert driver.end("poison").error_code is ErrorCode.UNDECODABLE
    assert letters(driver) == ()
    assert not worker.events("engine.step_failed")
    for innocent in asked:
        check_stream(driver, innocent)


def enqueue_around(driver: QueueDriver, poison: Asked | None) -> list[Asked]:
    """Queue sixty-three innocents, thirty before the poison; return them."""
    asked = [Asked(f"r{number}", max_tokens=12, seed=number) for number in range(63)]
    enqueue(driver, *asked[:30])
    if poison is not None:
        enqueue(driver, poison)
    enqueue(driver, *asked[30:])
    return asked


def letters(driver: QueueDriver) -> tuple[DeadLetter, ...]:
    """Return the dead letters."""
    return driver.run(list_dead(driver.keys))

"""Capacity: what may be claimed, by the engine's word and what it has not seen yet."""

from __future__ import annotations

import pytest

from headrace_worker.serving.capacity import MOST_ENDING, Capacity
from headrace_worker.serving.ports import Room, RoomIfDisplaced
from headrace_worker.serving.request import CANCELLED
from support.serving_parts import Books, make_grant, make_outcome, make_ready


@pytest.fixture
def capacity() -> Capacity:
    """Give a started engine of 64 KV slots and 4 sequences, one of which may wait beyond."""
    capacity = Capacity(num_prefetch=1, gives_way=False)
    capacity.engine_started(make_ready())
    return capacity


@pytest.fixture
def yielding() -> Capacity:
    """Give the same where work of later priority gives way, full by the engine's word."""
    capacity = Capacity(num_prefetch=1)
    capacity.engine_started(make_ready())
    capacity.step_done(make_outcome(free_blocks=0))
    return capacity


def test_without_an_engine_there_is_no_room() -> None:
    """Before the first start, and between two engines, nothing is claimed."""
    capacity = Capacity(num_prefetch=1)
    assert capacity.room([]) is None
    capacity.engine_started(make_ready())
    capacity.engine_gone()
    assert capacity.room([]) is None
    assert not capacity.is_open


def test_an_empty_engine_has_all_its_room(capacity: Capacity) -> None:
    """Free tokens equal the total: what the queue takes for an empty worker."""
    assert capacity.room([]) == Room(free_seqs=5, free_tokens=64, total_tokens=64)


def test_the_engine_s_word_counts(capacity: Capacity) -> None:
    """Free blocks are free tokens, after the growth that the engine expects."""
    capacity.step_done(make_outcome(free_blocks=3))
    room = capacity.room([])
    assert room is not None
    assert room.free_tokens == 12


def test_requests_being_prepared_are_subtracted(capacity: Capacity) -> None:
    """A grant counts with the cost that the queue put on it, until the engine hears of it."""
    books = Books()
    books.ledger.claim(make_grant("r1", cost=20))
    books.ledger.claim(make_grant("r2", cost=30))
    assert capacity.room(books.ledger.requests) == Room(3, 14, 64)


def test_requests_that_the_engine_has_not_seen_are_subtracted(capacity: Capacity) -> None:
    """A sent sequence counts with its cost until an outcome accounts for it."""
    books = Books()
    request = books.running(cost=40)
    capacity.sequence_sent(40)
    assert capacity.room([request]) == Room(4, 24, 64)
    capacity.step_done(make_outcome(adds_seen=1, free_blocks=11))
    assert capacity.room([request]) == Room(4, 44, 64)


def test_outcomes_of_a_former_engine_leave_no_trace(capacity: Capacity) -> None:
    """A new engine has seen nothing and owes nothing."""
    capacity.sequence_sent(40)
    capacity.engine_gone()
    capacity.engine_started(make_ready())
    assert capacity.room([]) == Room(5, 64, 64)


def test_ended_requests_take_no_room(capacity: Capacity) -> None:
    """What only waits for its last acknowledgement has no sequence any more."""
    books = Books()
    request = books.running()
    books.ledger.end(request, CANCELLED)
    assert capacity.room([request]) == Room(5, 64, 64)


def test_answers_that_redis_has_not_taken_bound_the_claim(capacity: Capacity) -> None:
    """A worker makes short answers faster than it sends them, and must not hold ever more."""
    books = Books()
    for number in range(MOST_ENDING):
        assert capacity.room(books.ledger.requests) == Room(5, 64, 64)
        request = books.ledger.claim(make_grant(f"r{number}"))
        assert request is not None
        books.ledger.end(request, CANCELLED)
    assert capacity.room(books.ledger.requests) is None


def test_sequences_bound_the_claim_as_well(capacity: Capacity) -> None:
    """Four run and one waits: no more, although blocks are free."""
    books = Books()
    requests = [books.running(f"r{n}") for n in range(5)]
    assert capacity.room(requests) is None


def test_only_a_small_prefetch_waits_in_the_engine(capacity: Capacity) -> None:
    """More than that waiting means that the engine has no room, whatever the blocks say."""
    capacity.step_done(make_outcome(num_waiting=1))
    assert capacity.room([]) is not None
    capacity.step_done(make_outcome(num_waiting=2))
    assert capacity.room([]) is None


def test_promises_beyond_what_is_free_leave_no_room(capacity: Capacity) -> None:
    """A cost above the whole pool is never negative room."""
    books = Books()
    books.ledger.claim(make_grant(cost=5000))
    assert capacity.room(books.ledger.requests) is None


def test_a_full_worker_tells_what_later_priorities_would_leave(yielding: Capacity) -> None:
    """For each priority that runs: what is left if it and all later ones give way."""
    books = Books()
    requests = [
        books.running("r1", priority=3, cost=10),
        books.running("r2", priority=9, cost=20),
        books.running("r3", priority=9, cost=20),
    ]
    assert yielding.room(requests) == Room(
        0, 0, 64, if_displaced=(RoomIfDisplaced(3, 4, 64), RoomIfDisplaced(9, 3, 54))
    )


def test_what_was_displaced_leaves_no_room_a_second_time(yielding: Capacity) -> None:
    """Those it gave way to count with their whole cost, so the next ones find the rest only."""
    books = Books()
    late = books.running("late", priority=9, cost=60)
    urgent = [books.running(f"r{n}", priority=0, cost=16) for n in range(3)]
    yielding.step_done(make_outcome(free_blocks=0, num_waiting=2))
    assert yielding.room([late, *urgent]) == Room(
        0, 0, 64, if_displaced=(RoomIfDisplaced(9, 1, 16),)
    )
    urgent.append(books.running("r3", priority=0, cost=16))
    assert yielding.room([late, *urgent]) is None


def test_the_soonest_priority_gives_way_to_nobody(yielding: Capacity) -> None:
    """A worker that is full of it does not claim."""
    assert yielding.room([Books().running(priority=0, cost=20)]) is None


def test_a_request_with_a_new_priority_gives_way_by_that(yielding: Capacity) -> None:
    """What counts is where it stands now, not where it was queued."""
    request = Books().running(priority=0, cost=20)
    request.priority = 7
    room = yielding.room([request])
    assert room is not None
    assert [left.priority for left in room.if_displaced] == [7]


def test_where_nobody_is_preempted_nobody_gives_way(capacity: Capacity) -> None:
    """With the worst case reserved, a full worker is full."""
    capacity.step_done(make_outcome(free_blocks=0))
    assert capacity.room([Books().running(priority=9, cost=20)]) is None


@pytest.mark.parametrize(
    ("more", "is_more"),
    [
        (Room(1, 0, 64), True),
        (Room(0, 1, 64), True),
        (Room(0, 0, 64), False),
        (Room(0, 0, 64, (RoomIfDisplaced(5, 2, 10),)), False),
        (Room(0, 0, 64, (RoomIfDisplaced(5, 1, 11),)), True),
        (Room(0, 0, 64, (RoomIfDisplaced(5, 3, 9),)), True),
        (Room(0, 0, 64, (RoomIfDisplaced(5, 2, 10), RoomIfDisplaced(9, 1, 1))), True),
    ],
)
def test_room_exceeds_another_when_something_new_may_fit(more: Room, is_more: bool) -> None:
    """More places or tokens, free or for those that others give way to, are worth a claim."""
    assert more.exceeds(Room(0, 0, 64, (RoomIfDisplaced(5, 2, 10),))) is is_more

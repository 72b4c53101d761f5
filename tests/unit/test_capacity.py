"""Capacity: what may be claimed, by the engine's word and what it has not seen yet."""

from __future__ import annotations

import pytest

from headrace_worker.serving.capacity import Capacity
from headrace_worker.serving.ports import Room
from headrace_worker.serving.request import CANCELLED
from support.serving_parts import Books, make_grant, make_outcome, make_ready


@pytest.fixture
def capacity() -> Capacity:
    """Give a started engine of 64 KV slots and 4 sequences, one of which may wait beyond."""
    capacity = Capacity(num_prefetch=1)
    capacity.engine_started(make_ready())
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

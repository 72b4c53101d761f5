"""Waiting on the ledger: for the first request, and for the last one to leave."""

from __future__ import annotations

import asyncio

import pytest

from support.serving_parts import Books
from support.waiting import PATIENCE_S


@pytest.fixture
def books() -> Books:
    """Give an empty ledger."""
    return Books()


async def test_waiting_for_an_empty_ledger_ends_with_the_last_request(books: Books) -> None:
    """Each departure is told, and the last one lets the drain go on."""
    requests = [books.running("r1"), books.running("r2")]
    waiting = asyncio.create_task(books.ledger.wait_until_empty())
    await asyncio.sleep(0)
    books.ledger.drop(requests[0], "lease lost")
    await asyncio.sleep(0)
    assert not waiting.done()
    books.ledger.drop(requests[1], "lease lost")
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert books.num_left == 2


async def test_waiting_for_a_request_ends_with_the_next_grant(books: Books) -> None:
    """Whoever looks at what is in flight sleeps while nothing is."""
    books.ledger.drop(books.running("r1"), "lease lost")
    waiting = asyncio.create_task(books.ledger.wait_until_filled())
    await asyncio.sleep(0)
    assert not waiting.done()
    books.running("r2")
    await asyncio.wait_for(waiting, PATIENCE_S)
    await asyncio.wait_for(books.ledger.wait_until_filled(), PATIENCE_S)  # no wait then

"""An echo reaches the terminal entry where no token took it along, and there was an answer."""

from __future__ import annotations

import pytest

from headrace_worker.serving.request import CANCELLED, STOPPED, End
from support.serving_parts import Books


@pytest.mark.parametrize(
    ("num_tokens", "end", "text"), [(0, STOPPED, "Say: "), (0, CANCELLED, ""), (1, STOPPED, "")]
)
async def test_only_an_answer_without_tokens_ends_with_its_echo(
    num_tokens: int, end: End, text: str
) -> None:
    """One that was cancelled before its first token has no text at all."""
    books = Books()
    request = books.running(echo="Say: ")
    books.say(request, *range(num_tokens))
    books.ledger.end(request, end)
    request.outbox.settle(num_tokens, books.clock.now)
    await books.ledger.finish(request)
    assert books.queue.ended["r1"].text == text

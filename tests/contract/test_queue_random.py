"""Random calls by several workers, stale and repeated ones included, keep the queue true."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from support.queue_model import ACTIONS, Action, QueueModel
from support.servers import Server

ENOUGH = {"emit OK", "emit FENCED", "emit DONE", "emit GAP", "finish OK", "finish FENCED"}


def test_any_sequence_of_calls_keeps_the_queue_true(server: Server) -> None:
    """Exactly one end each, at most one accepted writer, dense offsets, true counts, no leaks."""
    seen: set[str] = set()

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(actions=ACTIONS)
    def play(actions: list[Action]) -> None:
        with server.connect() as client:
            client.flushall()
            model = QueueModel(client)
            for action in actions:
                model.apply(action)
            model.drain()
            seen.update(model.seen)

    for _ in range(5):  # it is drawn what comes; once is nearly always enough
        play()
        if seen >= ENOUGH:
            break
    assert seen >= ENOUGH, "the sequences have missed what they are for"

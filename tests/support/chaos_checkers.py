"""What must hold after any fault, read from clients, from Redis and from engines."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace import functions
from headrace.types import FinishReason
from support.chaos_clients import Clients, View
from support.chaos_history import History, Outcome
from support.chaos_result import Result
from support.fake_engine import TALLY_RECORD
from support.key_leaks import find_leaks
from support.queue_driver import TENANT, QueueDriver
from support.streams import Asked, check_answer, check_stream, is_drained
from support.waiting import eventually

MOSTLY = 0.9  # of the enqueues must have had an answer, or the run shows little
MADE_AGAIN = 8  # tokens that a worker may hold back for company


def acknowledged(asked: Iterable[Asked], history: History) -> list[Asked]:
    """Return those that the queue said yes to: of the others nothing is promised but no double."""
    known = set(history.ids("enqueue", Outcome.OK))
    return [request for request in asked if request.request_id in known]


def check_set(driver: QueueDriver, history: History, result: Result) -> None:
    """Every acknowledged request has one terminal event, an unknown one at most one."""
    lost = [rid for rid in history.ids("enqueue", Outcome.OK) if num_ends(driver, rid) != 1]
    twice = [rid for rid in history.ids("enqueue", Outcome.UNKNOWN) if num_ends(driver, rid) > 1]
    result.measure(
        "acknowledged",
        len(history.ids("enqueue", Outcome.OK)),
        at_least=MOSTLY * sum(o.kind == "enqueue" for o in history.operations),
    )
    result.measure("unknown", len(history.ids("enqueue", Outcome.UNKNOWN)))
    result.measure("lost", len(lost), at_most=0)
    result.problems += [f"{rid}: not one terminal event" for rid in lost + twice]


def check_streams(driver: QueueDriver, asked: Iterable[Asked], result: Result) -> None:
    """The token log of every request, by XRANGE, is the reference and one end."""
    wrong = wrong_streams(driver, asked)
    result.measure("wrong", len(wrong), at_most=0)
    result.problems += wrong


def wrong_streams(
    driver: QueueDriver, asked: Iterable[Asked], *, by_the_book: bool = False
) -> list[str]:
    """Say of each wrong stream what is wrong; ``by_the_book`` asks for tokens and end alone."""
    check, found = (check_answer if by_the_book else check_stream), []
    for request in asked:
        try:
            check(driver, request)
        except AssertionError as error:
            found.append(f"{request.request_id}: {str(error).splitlines()[0]}")
    return found


def check_views(clients: Clients, asked: Iterable[Asked], result: Result) -> None:
    """Both readers of every request saw each token once, in order, and then its end."""
    problems: list[str] = []
    for request in asked:
        for kind, views in (("calm", clients.calm), ("restless", clients.restless)):
            view = views.get(request.request_id)
            wrong = _what_is_wrong(view, request) if view else "never read"
            problems += [f"{request.request_id}, {kind} reader: {wrong}"] if wrong else []
    result.measure("reads that left and came back", _leaves(clients))
    result.measure("wrong reads", len(problems), at_most=0)
    result.problems += problems


def check_resources(driver: QueueDriver, result: Result) -> None:
    """Nothing waits or runs, no lane or pending entry is left, no key lives for ever."""
    try:
        eventually(lambda: is_drained(driver))
    except AssertionError:
        result.problems.append(f"not drained: {driver.depth()}")
    result.measure("keys without an end", len(find_leaks(driver.client)), at_most=0)


def check_cost(tally: Path, asked: Sequence[Asked], result: Result, *, num_takeovers: int) -> None:
    """Tokens that engines made again are few: eight a takeover, as many as wait for company."""
    made = Counter(struct.iter_unpack(TALLY_RECORD, tally.read_bytes())) if tally.exists() else {}
    again = sum(made.values()) - len(made)
    of_request = Counter[int]()
    for (seed, _), times in made.items():
        of_request[seed] += times - 1
    delivered = sum(request.max_tokens for request in asked)
    result.measure("tokens made again", again)
    result.measure("of those delivered, %", 100 * again / max(1, delivered))
    most = MADE_AGAIN * result.size.slack  # more are made while a slow machine writes these down
    result.measure("a takeover", again / max(1, num_takeovers), at_most=most)
    result.measure("most for one request", max(of_request.values(), default=0))


def check_dead_letters(driver: QueueDriver, guilty: Iterable[str], result: Result) -> None:
    """Dead letters hold the guilty, all of them and nobody else."""
    dead = {letter.request_id for letter in driver.run(functions.list_dead(driver.keys))}
    guilty = set(guilty)
    result.measure("dead letters", len(dead))
    result.expect(dead <= guilty, f"innocent dead letters: {sorted(dead - guilty)}")
    result.expect(guilty <= dead, f"guilty and not buried: {sorted(guilty - dead)}")


def num_ends(driver: QueueDriver, request_id: str) -> int:
    """Count terminal entries: by their place in the log, which has one, behind the last token."""
    if not driver.client.exists(driver.keys.request(TENANT, request_id)):
        return 0
    return sum(entry_id.endswith("-1") for entry_id, *_ in driver.log(request_id))


def _leaves(clients: Clients) -> int:
    return sum(view.num_leaves for view in clients.restless.values())


def _what_is_wrong(view: View, request: Asked) -> str:
    if view.error or view.wrong:
        return view.error or view.wrong[0]
    if view.tokens != request.answer:
        return "wrong tokens"
    if view.end is None or view.end.finish_reason is not FinishReason.LENGTH:
        return f"a wrong end: {view.end}"
    return ""

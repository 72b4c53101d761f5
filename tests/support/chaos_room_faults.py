"""Shortage of room: few blocks, a crowd before one guest, batch work before one who waits."""

from __future__ import annotations

from functools import partial

from support.chaos_checkers import check_dead_letters, check_streams
from support.chaos_clients import Clients
from support.chaos_redis_faults import wait_until_drained
from support.chaos_stand import Stand
from support.chaos_worker_faults import check_everything
from support.streams import Asked

STEP_S = 0.01
FLUSH_S = 0.1  # that tokens and ends may wait for company, both ways
PLACES = 4  # sequences that run at a time where one has to give way
SERVED_AT_ONCE_S = 0.3
ALL_BUT_LUCK = 0.9  # of many who come, one may find a place that was left just now
SOONEST, LATEST = 0, 9
FEW_BLOCKS = 20  # of 16 tokens, less one for padding


def exhaust_blocks(stand: Stand) -> None:
    """Answers of about 100 tokens in a pool of 304: some are preempted, and none changes.

    The engine expects half of it at first, so it takes in four, of which not three can be whole.
    """
    stand.start_worker(step_s=STEP_S, num_blocks=FEW_BLOCKS)
    draw = stand.draw
    asked = [
        Asked(f"r{n}", max_tokens=draw.randrange(96, 110), seed=draw.getrandbits(62))
        for n in range(stand.size.requests)
    ]
    with stand.load(asked):
        pass
    preempted = len(stand.events("sequence.preempted"))
    stand.result.measure("requests preempted", preempted, at_least=1)
    check_everything(stand, asked)


def crowd_out(stand: Stand) -> None:
    """One tenant has thousands of requests waiting, another one comes with a single one."""
    crowd = [Asked(f"a{n}", max_tokens=20, seed=n) for n in range(stand.size.requests)]
    guest = stand.new_clients(tenant="guest")
    with stand.load(crowd, in_flight=len(crowd), is_read=False):
        pass
    stand.start_worker("--max-num-seqs", "8", step_s=STEP_S)
    queued, waited_s = [], []
    for number in range(stand.size.rounds):
        stand.until(partial(have_ended, stand, 8 * (number + 1)))
        queued.append(stand.driver.depth().queued)
        alone = Asked(f"b{number}", max_tokens=5, seed=number)
        waited_s.append(seconds_to_first_token(stand, guest, alone))
    stand.result.measure("of the crowd before it", min(queued), at_least=1)
    turn_s = longest_turn_s(stand)
    stand.result.measure("longest turn of the batch, s", turn_s)
    stand.result.time("longest time to first token", max(waited_s), at_most_s=turn_s + FLUSH_S)
    left = stand.driver.depth().queued
    drained_s = wait_until_drained(stand)
    stand.result.measure("crowd answered a second", left / drained_s)
    check_streams(stand.driver, crowd, stand.result)
    check_dead_letters(stand.driver, (), stand.result)


def displace(stand: Stand) -> None:
    """Batch work fills all places, and more of it is queued; who waits at a screen goes first."""
    stand.start_worker("--max-num-seqs", str(PLACES), step_s=STEP_S)
    batch = [
        Asked(f"batch{n}", max_tokens=stand.size.tokens, seed=n, priority=LATEST)
        for n in range(stand.size.requests)
    ]
    guest, urgent, queued, waited_s = stand.new_clients(), [], [], []
    with stand.load(batch, in_flight=len(batch)):
        for number in range(stand.size.rounds):
            stand.wait_for_tokens((number + 1) * stand.size.tokens)
            queued.append(stand.driver.depth().queued)
            alone = Asked(f"soon{number}", max_tokens=5, seed=number, priority=SOONEST)
            urgent.append(alone)
            waited_s.append(seconds_to_first_token(stand, guest, alone))
    stand.result.measure("of the batch still queued", min(queued), at_least=1)
    stand.until(partial(have_ended, stand, len(batch) + len(urgent)))
    ended = stand.events("request.finished")
    names = {request.request_id for request in urgent}
    first_s: list[float] = [e["ttft_s"] for e in ended if e["request_id"] in names]
    stand.result.time("longest until a first token", max(first_s), at_most_s=SERVED_AT_ONCE_S)
    stand.result.measure("longest until its reader had it, s", max(waited_s))
    stand.result.measure("longest turn of the batch, s", longest_turn_s(stand))
    preemptions = sum(event["preemptions"] for event in ended)  # one may give way twice
    least = ALL_BUT_LUCK * stand.size.rounds
    stand.result.measure("times that one gave way", preemptions, at_least=least)
    check_everything(stand, batch)
    check_streams(stand.driver, urgent, stand.result)


def have_ended(stand: Stand, number: int) -> bool:
    """Whether workers have logged the end of so many requests."""
    return len(stand.events("request.finished")) >= number


def longest_turn_s(stand: Stand) -> float:
    """Return the longest time that an answer took from its admission to its end, as logged."""
    finished = stand.events("request.finished")
    turns_s: list[float] = [event["e2e_s"] - event["queue_s"] for event in finished]
    return max(turns_s)


def seconds_to_first_token(stand: Stand, clients: Clients, asked: Asked) -> float:
    """Ask, read the whole answer, and return how long its first chunk took."""
    asked_s = stand.history.now_s
    with stand.load([asked], clients=clients):
        pass
    return clients.calm[asked.request_id].times_s[0] - asked_s

"""Faults of the network: replies lost, connections cut, lines that are silent, slow or late."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from support.chaos_stand import Stand
from support.chaos_worker_faults import check_everything, kill_points
from support.tcp_proxy import TcpProxy

FUNCTIONS = ("enqueue", "claim", "emit", "finish", "renew")
NOTICED_S = 6.0
RESET_EVERY_S = 0.1


def lose_replies(stand: Stand) -> None:
    """Each function's work is done and its answer lost, for workers and clients alike."""
    asked = stand.make_requests()
    proxy = stand.proxy()
    stand.start_worker(url=proxy.url)
    stand.clients = stand.new_clients(proxy.url)
    with stand.load(asked, in_flight=8) as load:
        for number in range(stand.size.rounds):
            function = FUNCTIONS[number % len(FUNCTIONS)]
            before = proxy.num_swallowed
            stand.history.note("lose replies", function=function)
            proxy.lose_replies(f"headrace_1_{function}".encode())
            stand.until(partial(has_lost, proxy, before, load))
    stand.result.measure("replies lost", proxy.num_swallowed, at_least=min(5, stand.size.rounds))
    check_everything(stand, asked)


def reset_connections(stand: Stand) -> None:
    """TCP resets of every connection, again and again, until there were enough reconnects."""
    proxy = stand.proxy()
    stand.start_worker(url=proxy.url)
    stand.clients = stand.new_clients(proxy.url)
    asked, wanted = stand.make_requests(), stand.size.rounds
    first = proxy.num_connections
    with stand.load(asked) as load:
        while not load.done() and proxy.num_connections - first < wanted:
            stand.in_loop(proxy.reset_all)
            stand.wait_for_s(stand.draw.uniform(0.5, 1.5) * RESET_EVERY_S)
    stand.result.measure("reconnects", proxy.num_connections - first, at_least=wanted)
    check_everything(stand, asked)


def silence_worker(stand: Stand) -> None:
    """Nothing passes between a worker and Redis, without a reset; another worker takes over."""
    proxy = stand.proxy()
    asked = stand.make_requests()
    cut_off = stand.start_worker(url=proxy.url)
    stand.start_worker()
    noticed_s = []
    with stand.load(asked):
        for number, tokens in enumerate(kill_points(stand, asked), start=1):
            stand.wait_for_tokens(tokens)
            started_s = time.monotonic()
            silence(stand, proxy, "worker")
            cut_off.wait_for("redis.disconnected", number, timeout_s=30)
            noticed_s.append(time.monotonic() - started_s)
            stand.wait_for_s(stand.size.seconds)
            proxy.is_silent = False
            cut_off.wait_for("redis.reconnected", number, timeout_s=30)
    stand.result.time("noticed after", max(noticed_s), at_most_s=NOTICED_S)
    check_everything(stand, asked)


def silence_clients(stand: Stand) -> None:
    """Nothing passes between readers and Redis, without a reset; they find their way back."""
    proxy = stand.proxy()
    stand.clients = stand.new_clients(proxy.url)
    stand.start_worker()
    asked = stand.make_requests()
    recovered_s = []
    with stand.load(asked):
        for tokens in kill_points(stand, asked):
            stand.wait_for_tokens(tokens)
            silence(stand, proxy, "clients")
            stand.wait_for_s(stand.size.seconds)
            proxy.is_silent = False
            started_s, seen = time.monotonic(), stand.clients.num_tokens
            stand.until(partial(has_seen_more, stand, seen))
            recovered_s.append(time.monotonic() - started_s)
    stand.result.time("tokens again after", max(recovered_s), at_most_s=NOTICED_S)
    check_everything(stand, asked)


def trouble_line(stand: Stand) -> None:
    """Slow, late, sliced and half-closed lines for workers and clients: all is exact."""
    proxy = stand.proxy()
    stand.start_worker(url=proxy.url)
    stand.clients = stand.new_clients(proxy.url)
    asked = stand.make_requests()
    with stand.load(asked) as load:
        for number in range(stand.size.rounds):
            name, toxic = toxics(stand, proxy)[number % 4]
            stand.history.note("trouble line", how=name)
            stand.in_loop(toxic)
            stand.wait_for_s(stand.size.seconds)
            stand.in_loop(partial(heal, proxy))
            if load.done():
                break
    stand.result.measure("connections", proxy.num_connections)
    check_everything(stand, asked)


def toxics(stand: Stand, proxy: TcpProxy) -> list[tuple[str, Callable[[], object]]]:
    """Return what can be wrong with a line, by name."""
    return [
        ("20 ms late", partial(setattr, proxy, "delay_s", 0.02)),
        (
            "slices of 1 to 7 bytes",
            partial(setattr, proxy, "slice_bytes", stand.draw.randint(1, 7)),
        ),
        ("20 kB/s", partial(setattr, proxy, "bytes_per_s", 20_000.0)),
        ("half-closed", proxy.half_close_all),
    ]


def heal(proxy: TcpProxy) -> None:
    """Let everything pass as it is."""
    proxy.delay_s, proxy.slice_bytes, proxy.bytes_per_s = 0.0, None, None


def silence(stand: Stand, proxy: TcpProxy, whom: str) -> None:
    """Let nothing pass."""
    stand.history.note("silence", whom=whom, seconds=stand.size.seconds)
    proxy.is_silent = True


def has_lost(proxy: TcpProxy, before: int, load: Future[None]) -> bool:
    """Whether one more reply is lost, or nobody asks any more."""
    return proxy.num_swallowed > before or load.done()


def has_seen_more(stand: Stand, seen: int) -> bool:
    """Whether calm readers have seen more tokens than so many."""
    return stand.clients.num_tokens > seen

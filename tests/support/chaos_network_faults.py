"""Faults of the network: replies lost, connections reset, lines that go silent."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from support.chaos_stand import Stand
from support.chaos_worker_faults import check_everything
from support.tcp_proxy import TcpProxy

FUNCTIONS = ("enqueue", "claim", "emit", "finish", "renew")


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


def has_lost(proxy: TcpProxy, before: int, load: Future[None]) -> bool:
    """Whether one more reply is lost, or nobody asks any more."""
    return proxy.num_swallowed > before or load.done()

"""A whole worker whose engine is two processes: what it tells, and what a lost one costs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace import Completion
from support.process_tree import children_of, is_running
from support.tiny_worker import TinyWorker, tiny_worker
from support.waiting import eventually

OPTIONS: dict[str, Any] = {"max_tokens": 200, "temperature": 0.8, "seed": 5}
PROMPTS = ["the river", "the mill", "the water"]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyWorker]:
    """Give a worker whose model is cut over two ranks."""
    folder = tmp_path_factory.mktemp("cut")
    with tiny_worker(folder, HEADRACE_TENSOR_PARALLEL_SIZE="2", HEADRACE_LEASE_TTL="15s") as worker:
        yield worker


def ranks_of(worker: TinyWorker) -> tuple[int, int]:
    """Return the first rank's process and the second's, once both are there."""

    def find() -> list[tuple[int, int]]:
        firsts = children_of(worker.process.child.pid)
        return [(first, second) for first in firsts for second in children_of(first)]

    return eventually(find)[0]


def test_the_size_is_told_in_log_and_heartbeat(cut: TinyWorker) -> None:
    """Whoever reads the log or asks for the status sees over how many ranks a model is cut."""
    (loaded,) = cut.process.events("model.loaded")
    assert loaded["tensor_parallel_size"] == 2
    keys = cut.driver.keys
    facts = eventually(lambda: cut.driver.client.hgetall(keys.worker("worker-1")))
    assert facts[b"tensor_parallel_size"] == b"2"


def test_requests_go_on_after_the_death_of_a_rank(cut: TinyWorker) -> None:
    """All ranks end with it and are started again; every answer is what it would have been."""
    wanted = [cut.ask(prompt, **OPTIONS) for prompt in PROMPTS]
    before = ranks_of(cut)

    def ask(prompt: str) -> Completion:
        with cut.client.stream(prompt, **{"ignore_eos": True, **OPTIONS}) as chunks:
            for chunk in chunks:
                if chunk.index == 0 and prompt == PROMPTS[0]:
                    os.kill(before[1], signal.SIGKILL)
        return chunks.completion

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        told = list(threads.map(ask, PROMPTS))
    assert [answer.token_ids for answer in told] == [answer.token_ids for answer in wanted]
    (failed,) = cut.process.wait_for("engine.step_failed")
    assert "rank 1: killed by signal 9" in failed["reason"]
    eventually(lambda: not any(map(is_running, before)))
    assert not set(ranks_of(cut)) & set(before)


def test_a_worker_that_is_told_to_stop_leaves_no_rank_behind(cut: TinyWorker) -> None:
    """SIGTERM ends the worker in order, and with it every process that it started."""
    pids = ranks_of(cut)
    cut.process.send(signal.SIGTERM)
    assert cut.process.wait() == 0
    eventually(lambda: not any(map(is_running, pids)))

"""Known failures of other engines, replayed at a whole worker with hardly any memory."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace import Completion, FinishReason, SyncTokenStream
from support.tiny_worker import TinyWorker, tiny_worker

PROMPTS = [f"{i} rivers bring the water to the mill" for i in range(6)]
OPTIONS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyWorker]:
    """Give a worker with a pool of eleven blocks: about two of the requests below."""
    folder = tmp_path_factory.mktemp("small")
    settings = {"HEADRACE_KV_CACHE_MEMORY": "96KiB", "HEADRACE_LEASE_TTL": "15s"}
    with tiny_worker(folder, **settings) as worker:
        yield worker


@pytest.fixture(scope="module")
def alone(small: TinyWorker) -> list[Completion]:
    """Give the answers of requests that had the worker for themselves."""
    return [small.ask(prompt, **OPTIONS) for prompt in PROMPTS]


def read(chunks: SyncTokenStream) -> tuple[Completion, list[int], str]:
    """Read an answer chunk by chunk; each begins where the one before it ended."""
    token_ids: list[int] = []
    text, num_chunks = "", 0
    for chunk in chunks:
        assert chunk.index == len(token_ids)
        token_ids += chunk.token_ids
        text += chunk.text
        num_chunks += bool(chunk.token_ids)
    assert num_chunks > 1, "it came whole"
    return chunks.completion, token_ids, text


def test_streams_of_preempted_requests_are_complete_and_say_nothing_twice(
    small: TinyWorker, alone: list[Completion]
) -> None:
    """Six streams in a pool for two: every token comes once, and is that of a run alone (B34)."""
    for _ in range(30):  # the worker learns that answers are short, and so takes in too many
        small.ask("the mill", max_tokens=60, stop=["a", "e", "i", "o", "u", " "])
    with ExitStack() as streams, ThreadPoolExecutor(len(PROMPTS)) as threads:
        with small.held():  # so that it meets all of them at once
            opened = [small.client.stream(prompt, **OPTIONS) for prompt in PROMPTS]
            asked = [streams.enter_context(stream) for stream in opened]
        told = list(threads.map(read, asked))
    finished = small.process.wait_for("request.finished", count=len(alone) + 30 + len(told))
    assert sum(line["preemptions"] for line in finished) >= 1
    for expected, (completion, token_ids, text) in zip(alone, told, strict=True):
        assert token_ids == list(completion.token_ids) == list(expected.token_ids)
        assert text == completion.text == expected.text


def test_two_batches_on_one_worker_are_complete_and_in_order(
    small: TinyWorker, alone: list[Completion]
) -> None:
    """The second gets all its answers, too (B39)."""
    for _ in range(2):
        answers = list(small.client.generate_many(PROMPTS, max_in_flight=4, **OPTIONS))
        assert [answer.text for answer in answers] == [answer.text for answer in alone]


def test_a_single_token_comes_with_its_text_before_the_end(small: TinyWorker) -> None:
    """An answer of one token is told whole: chunk, text, usage, reason (B13, B51)."""
    with small.client.stream("the river", max_tokens=1, temperature=0, ignore_eos=True) as chunks:
        told = list(chunks)
    assert [len(chunk.token_ids) for chunk in told if chunk.token_ids] == [1]
    assert "".join(chunk.text for chunk in told) == chunks.completion.text != ""
    assert chunks.completion.usage.completion_tokens == 1
    assert chunks.completion.finish_reason is FinishReason.LENGTH


def test_an_idle_worker_uses_hardly_any_processor_time(small: TinyWorker) -> None:
    """Both of its processes together stay below two per cent of a core, and sleep long (B50)."""
    num_finished = len(small.process.events("request.finished"))
    small.ask("the river")
    small.process.wait_for("request.finished", count=num_finished + 1)
    pids = processes_of(small.process.child.pid)
    begun_s, woken, shares = time.monotonic(), num_wakes(pids), []
    for _ in range(4):  # the quietest counts: what disturbs a processor costs its processes time
        started_s, used_s = time.monotonic(), cpu_s(pids)
        with pytest.raises(subprocess.TimeoutExpired):
            small.process.child.wait(1)  # nobody asks, and it stays
        shares.append((cpu_s(pids) - used_s) / (time.monotonic() - started_s))
    assert num_wakes(pids) - woken <= 8 * (time.monotonic() - begun_s)
    assert min(shares) <= 0.02


def processes_of(pid: int) -> list[int]:
    """Return a process and those that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(process for child in children for process in processes_of(int(child)))]


def cpu_s(pids: list[int]) -> float:
    """Return the seconds on a processor of all their threads, by the scheduler's own clock."""
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def num_wakes(pids: list[int]) -> int:
    """Count how often their threads went to sleep, which no other work on the machine changes."""
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/status")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))

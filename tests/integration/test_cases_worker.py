"""Known failures of other engines, replayed at a whole worker with hardly any memory."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace import Completion, FinishReason
from support.tiny_worker import TinyWorker, tiny_worker

PROMPTS = [f"{i} rivers bring the water to the mill" for i in range(6)]
OPTIONS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyWorker]:
    """Give a worker with a pool of eleven blocks: about two of the requests below."""
    folder = tmp_path_factory.mktemp("small")
    with tiny_worker(folder, HEADRACE_KV_CACHE_MEMORY="96KiB") as worker:
        yield worker


@pytest.fixture(scope="module")
def alone(small: TinyWorker) -> list[Completion]:
    """Give the answers of requests that had the worker for themselves."""
    return [small.ask(prompt, **OPTIONS) for prompt in PROMPTS]


def stream(small: TinyWorker, prompt: str) -> tuple[Completion, list[int], str]:
    """Read an answer chunk by chunk; each begins where the one before it ended."""
    token_ids: list[int] = []
    text = ""
    with small.client.stream(prompt, **OPTIONS) as chunks:
        for chunk in chunks:
            assert chunk.index == len(token_ids)
            token_ids += chunk.token_ids
            text += chunk.text
    return chunks.completion, token_ids, text


def test_streams_of_preempted_requests_are_complete_and_say_nothing_twice(
    small: TinyWorker, alone: list[Completion]
) -> None:
    """Six streams in a pool for two: every token comes once, and is that of a run alone (B34)."""
    for _ in range(30):  # the worker learns that answers are short, and so takes in too many
        small.ask("the mill", max_tokens=60, stop=["a", "e", "i", "o", "u", " "])
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        told = list(threads.map(lambda prompt: stream(small, prompt), PROMPTS))
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
    """Both of its processes sleep, where a loop that spins would take a whole core (B50)."""
    small.ask("the river")
    started_s, used_s = time.monotonic(), cpu_s(small.process.child.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        small.process.child.wait(2)  # nobody asks, and it stays
    elapsed_s = time.monotonic() - started_s
    assert cpu_s(small.process.child.pid) - used_s <= 0.3 * elapsed_s


def cpu_s(pid: int) -> float:
    """Return the processor time of a process and those that it started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / 100 + sum(cpu_s(int(child)) for child in children)

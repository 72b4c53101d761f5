"""The main job: a real model, a real server, two hundred requests, and a worker that is killed."""

from __future__ import annotations

import random
import shlex
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace import AsyncClient, Completion, RequestState, Timeout
from headrace.folders import cache_folder
from headrace.keys import Keys
from headrace_worker.wiring import ENGINE_COMMAND
from support.demo_model import NAME, questions
from support.queue_driver import QueueDriver
from support.servers import Server
from support.streams import is_drained
from support.waiting import eventually
from support.worker_fixtures import ON_VALKEY
from support.workers import WorkerFarm, WorkerProcess

NUM_REQUESTS = 200
KILL_AFTER = 80  # finished requests
PATIENT = Timeout(first_chunk=550.0, between_chunks=550.0)  # the test's own limit comes next

pytestmark = [pytest.mark.model, pytest.mark.timeout(600), ON_VALKEY]


@pytest.fixture
async def client(server: Server, queue: Keys) -> AsyncIterator[AsyncClient]:
    """A client of the test's queue."""
    async with AsyncClient(server.url, queue=queue.queue, timeout=PATIENT) as client:
        yield client


async def test_two_hundred_streams_survive_the_kill_of_their_worker(
    client: AsyncClient, driver: QueueDriver, farm: WorkerFarm
) -> None:
    """Every answer equals that of an undisturbed run, and status tells the truth throughout."""
    first = start_real_worker(farm)
    expected = await ask_all(client, "undisturbed")
    assert len(expected) == NUM_REQUESTS
    assert "Paris" in expected[0].text

    answers: dict[int, Completion] = {}
    async for answer in client.generate_many(
        skewed_requests(), max_in_flight=NUM_REQUESTS, request_id="disturbed"
    ):
        answers[number_of(answer)] = answer
        if len(answers) == KILL_AFTER:
            first.kill()
            await check_states(client, answers)
            second = start_real_worker(farm)

    assert {n: a.token_ids for n, a in answers.items()} == {
        n: a.token_ids for n, a in expected.items()
    }
    assert {n: a.text for n, a in answers.items()} == {n: a.text for n, a in expected.items()}
    resumed = [e for e in second.events("delivery.reclaimed") if e["num_tokens"] > 0]
    assert resumed, "the kill was meant to interrupt streams that had begun"
    for number, answer in answers.items():
        status = await client.status(f"disturbed:{number}")
        assert status.state is RequestState.FINISHED
        assert status.num_tokens == len(answer.token_ids) == answer.usage.completion_tokens
    assert eventually(lambda: is_drained(driver))


def start_real_worker(farm: WorkerFarm) -> WorkerProcess:
    """Start a worker that serves SmolLM2 in float32."""
    return farm.ready(
        *("--max-num-seqs", "64", "--lease-ttl", "5s"),  # what the killed one held is waited for
        env={
            "HEADRACE_MODEL": NAME,
            "HEADRACE_SERVED_MODEL_NAME": NAME,
            "HEADRACE_ENGINE_COMMAND": shlex.join(ENGINE_COMMAND),
            "HEADRACE_CACHE_DIR": str(cache_folder()),
            "HEADRACE_DTYPE": "float32",
        },
    )


def skewed_requests() -> list[dict[str, Any]]:
    """Return greedy requests, the first one easy; most are short, some ten times as long."""
    draw = random.Random(2)
    contents = ["What is the capital of France?"]
    while len(contents) < NUM_REQUESTS:
        contents.append(" ".join(draw.sample(questions(), draw.choice((1, 1, 1, 2, 4)))))
    return [
        {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 12 if number == 0 else min(60, 2 + int(draw.expovariate(1 / 10))),
            "temperature": 0,
        }
        for number, content in enumerate(contents)
    ]


async def ask_all(client: AsyncClient, name: str) -> dict[int, Completion]:
    """Return all answers by the number of their request."""
    many = client.generate_many(skewed_requests(), max_in_flight=NUM_REQUESTS, request_id=name)
    return {number_of(answer): answer async for answer in many}


async def check_states(client: AsyncClient, answers: dict[int, Completion]) -> None:
    """Compare what status says, with no worker left, with what has been received."""
    states = Counter[RequestState]()
    for number in range(NUM_REQUESTS):
        status = await client.status(f"disturbed:{number}")
        states[status.state] += 1
        if number in answers:
            assert status.state is RequestState.FINISHED
        if status.state is RequestState.QUEUED:
            assert status.num_tokens == 0
    assert states.total() == NUM_REQUESTS
    assert states[RequestState.RUNNING] > 0
    assert states.keys() <= {RequestState.QUEUED, RequestState.RUNNING, RequestState.FINISHED}


def number_of(answer: Completion) -> int:
    """Return the place of a request in the list, which its id ends with."""
    return int(answer.request_id.rpartition(":")[2])

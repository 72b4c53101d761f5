"""What users ask and are told is in no log line, no metric and no list of dead letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from headrace import InvalidRequest, RequestError
from headrace.functions import list_dead
from support.fake_engine import Misfortune
from support.queue_driver import TENANT, QueueDriver
from support.servers import free_port
from support.streams import Asked, enqueue, wait_for_ends
from support.tiny_worker import tiny_worker
from support.waiting import PATIENCE_S
from support.worker_fixtures import ON_VALKEY
from support.workers import WorkerFarm

CANARY = "xyzzy canary plugh"
IDS = (777, 666, 555)
IN_LOGS = ("xyzzy", "plugh", "777, 666")
USER = {"role": "user", "content": CANARY}
TOOL = {"type": "function", "function": {"name": "xyzzy", "parameters": {"type": "object"}}}


def _answered() -> list[dict[str, Any]]:
    """Return requests with the canary in each place, its answer included, that are served."""
    choice = {"type": "choice", "choice": [CANARY]}
    return [
        {"prompt": CANARY, "echo": True, "metadata": {"who": CANARY}},
        {"prompt": None, "messages": [USER], "tools": [TOOL]},
        {"prompt": "Say it", "response_format": choice, "ignore_eos": False, "max_tokens": 200},
        {"prompt": "the river", "stop": [CANARY], "bad_words": ["plugh"]},
    ]


def _refused() -> list[dict[str, Any]]:
    """Return requests that the worker refuses, and whose error may quote the canary."""
    return [
        {"prompt": CANARY * 5000},
        {"prompt": CANARY, "model": "xyzzy-7b"},
        {"prompt": None, "messages": [{"role": "user", "content": [{"type": "xyzzy"}]}]},
        {"prompt": CANARY, "response_format": {"type": "regex", "regex": "(xyzzy|plugh"}},
        {"prompt": CANARY, "response_format": {"type": "grammar", "grammar": 'start: "xyzzy" ('}},
    ]


def test_no_text_of_users_is_written_anywhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At level debug: answers, refusals and bytes that are no message leave no trace."""
    port = free_port()
    with tiny_worker(tmp_path, HEADRACE_METRICS_PORT=str(port)) as tiny:
        answers = [tiny.ask(**options) for options in _answered()]
        assert CANARY in answers[2].text
        for options in _refused():
            with pytest.raises((RequestError, InvalidRequest)):
                tiny.ask(**options)
        for number, payload in enumerate((CANARY.encode(), json.dumps({"p": CANARY}).encode())):
            tiny.driver.enqueue(f"raw-{number}", payload=payload)
        wait_for_ends(tiny.driver, Asked("raw-0"), Asked("raw-1"))
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
            metrics = page.read().decode()
        assert "headrace_request_failure" in metrics
        said = tiny.process.output
    assert len(tiny.process.events("request.rejected")) >= 4
    _check_silence(said, metrics, *capfd.readouterr())


@ON_VALKEY
def test_a_crash_tells_nothing_of_the_prompt(
    driver: QueueDriver, farm: WorkerFarm, capfd: pytest.CaptureFixture[str]
) -> None:
    """An engine that breaks, one that is killed, and the dead letter: ids of tokens nowhere."""
    worker = farm.ready("--max-strikes", "2")
    trouble = [
        Asked("fails", prompt=(*IDS, Misfortune.FAIL_REQUEST, 2)),
        Asked("breaks", prompt=(*IDS, Misfortune.BREAK_ENGINE, 2)),
        Asked("kills", prompt=(*IDS, Misfortune.CRASH, 2)),
    ]
    enqueue(driver, *trouble)
    wait_for_ends(driver, *trouble)
    letters = driver.run(list_dead(driver.keys))
    assert {letter.request_id for letter in letters} == {"breaks", "kills"}
    assert worker.wait_for("request.failed")
    _check_silence(worker.output, *(repr(letter) for letter in letters), *capfd.readouterr())
    assert driver.client.xlen(driver.keys.dead) == 2
    assert all(letter.tenant == TENANT for letter in letters)


def _check_silence(*said: str) -> None:
    for text in said:
        telling = [line for line in text.splitlines() if any(word in line for word in IN_LOGS)]
        assert telling == []

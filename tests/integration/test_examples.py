"""The programs of examples/, and the README's first one, do what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace import Client
from headrace.testing import FakeWorker
from support.example_runs import run, start
from support.repository import ROOT, fences
from support.waiting import eventually

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)

ANSWER = "Because air scatters short waves more than long ones."


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_first_program_of_the_readme_prints_the_answer(redis_url: str) -> None:
    """Twelve lines of client code stream an answer to the terminal."""
    program = next(fence.text for fence in fences(ROOT / "README.md") if fence.language == "python")
    with FakeWorker(redis_url, answers={"Why is the sky blue?": ANSWER}):
        assert run("-c", program.replace("redis://localhost:6379/0", redis_url)) == ANSWER


def test_enqueue_prints_the_id_and_leaves_the_request_in_the_queue(redis_url: str) -> None:
    """The program ends without waiting for a worker."""
    printed = run("examples/enqueue.py", "--id", "order-42", "Thank you", REDIS_URL=redis_url)
    with Client(redis_url) as client:
        status = client.status("order-42")
    assert printed == "order-42\n"
    assert (status.state, status.deadline_at_s is not None) == ("queued", True)


def test_enqueue_run_twice_makes_one_request(redis_url: str) -> None:
    """The same id with the same prompt is the same request, and is answered once."""
    for _ in range(2):
        run("examples/enqueue.py", "--id", "order-42", "Thank you", REDIS_URL=redis_url)
    with (
        FakeWorker(redis_url) as worker,
        Client(redis_url) as client,
        client.attach("order-42") as stream,
    ):
        assert stream.read().text == "Thank you"
    assert [request.request_id for request in worker.requests] == ["order-42"]


def test_extract_asks_for_a_schema_and_prints_the_facts(redis_url: str) -> None:
    """The request has the schema, and the answer is read as JSON."""
    answers = {"Ada": '{"name": "Ada Lovelace", "year": 1815}'}
    with FakeWorker(redis_url, answers=answers) as worker:
        assert run("examples/extract.py", "Ada", REDIS_URL=redis_url) == "Ada Lovelace, 1815\n"
    form = worker.requests[0].sampling.response_format
    assert form is not None
    assert form["json_schema"]["schema"]["required"] == ["name", "year"]


def test_resume_goes_on_behind_what_it_had(redis_url: str, tmp_path: Path) -> None:
    """A reader killed in the middle, its last line torn, ends up with every token once."""
    path = tmp_path / "order-42.jsonl"
    command = ("examples/resume.py", "order-42", str(path))
    run("examples/enqueue.py", "--id", "order-42", ANSWER, REDIS_URL=redis_url)
    with FakeWorker(redis_url, token_delay_s=0.02):
        first = start(*command, REDIS_URL=redis_url)
        eventually(lambda: path.exists() and path.read_text().count("\n") >= 3)
        first.kill()
        first.communicate()
        with path.open("a") as out:
            out.write('{"index": 4, "tok')
        run(*command, REDIS_URL=redis_url)
    chunks = _lines(path)
    assert "".join(chunk["text"] for chunk in chunks) == ANSWER
    ends = [chunk["index"] + len(chunk["token_ids"]) for chunk in chunks]
    assert [chunk["index"] for chunk in chunks] == [0, *ends[:-1]]


def test_batch_writes_one_line_for_each_question(redis_url: str, tmp_path: Path) -> None:
    """Answers and failures are told apart, and one failure does not end the run."""
    (tmp_path / "faq.txt").write_text("Where?\n\nWhen?\nWho?\n")
    answers = tmp_path / "answers.jsonl"
    with FakeWorker(redis_url, answers={"Where?": "Here.", "When?": "Now."}):
        run("examples/batch.py", str(tmp_path / "faq.txt"), str(answers), REDIS_URL=redis_url)
    results = {line["id"]: line for line in _lines(answers)}
    assert results["faq-1"]["text"] == "Here."
    assert results["faq-3"]["text"] == "Now."
    assert "FakeWorker has no answer to 'Who?'" in results["faq-4"]["error"]


def test_batch_run_again_asks_only_what_is_open(redis_url: str, tmp_path: Path) -> None:
    """A second run skips lines that have a result, and repairs a torn one."""
    (tmp_path / "faq.txt").write_text("Where?\nWhen?\n")
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"id": "faq-1", "text": "Here.", "finish_reason": "stop"}\n{"id": "fa')
    with FakeWorker(redis_url) as worker:
        run("examples/batch.py", str(tmp_path / "faq.txt"), str(answers), REDIS_URL=redis_url)
    assert [request.request_id for request in worker.requests] == ["faq-2"]
    assert [line["text"] for line in _lines(answers)] == ["Here.", "When?"]

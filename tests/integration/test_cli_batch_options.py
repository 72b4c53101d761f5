"""The options of batch lines on a real queue: from the line to the worker, and back to the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.keys import Keys
from headrace.testing import FakeWorker
from support.command import make_caller

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)

TOOL = {"type": "function", "function": {"name": "f"}}


def body_of(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a result line that is an answer."""
    assert entry["error"] is None, entry
    body: dict[str, Any] = entry["response"]["body"]
    return body


def test_options_go_to_the_worker_and_come_back_in_the_file(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    redis_url: str,
    queue: Keys,
    tmp_path: Path,
) -> None:
    """Tools and forms reach the worker; echo and logprobs of the prompt reach the file."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "n": 2}
    lines = [
        ("chat", "/v1/chat/completions", chat | {"chat_template_kwargs": {"x": 1}}),
        ("form", "/v1/completions", {"prompt": "Hi", "guided_choice": ["Hi"]}),
        ("echo", "/v1/completions", {"prompt": [72, 105], "echo": True, "logprobs": 0}),
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    entries = [{"custom_id": i, "method": "POST", "url": u, "body": b} for i, u, b in lines]
    source.write_text("\n".join(map(json.dumps, entries)))
    where = ("--redis-url", redis_url, "--queue", queue.queue)
    with FakeWorker(redis_url, queue=queue.queue) as worker:
        call = make_caller(capfd, monkeypatch)
        assert call("run-batch", "-i", str(source), "-o", str(target), *where).code == 0
    asked = [r for r in worker.requests if r.messages is not None]
    assert [(r.tools, r.chat_template_kwargs) for r in asked] == [((TOOL,), {"x": 1})] * 2
    forms = [r.sampling.response_format for r in worker.requests if r.prompt == "Hi"]
    assert forms == [{"type": "choice", "choice": ["Hi"]}]
    found = {entry["custom_id"]: entry for entry in map(json.loads, target.open())}
    (echoed,) = body_of(found["echo"])["choices"]
    assert echoed["text"] == "HiHi"
    assert echoed["logprobs"]["token_logprobs"] == [None, 0.0, 0.0, 0.0]
    assert echoed["prompt_logprobs"][1]["105"]["logprob"] == 0.0
    assert len(body_of(found["chat"])["choices"]) == 2

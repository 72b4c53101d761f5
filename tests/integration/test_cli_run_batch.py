"""run-batch on a real queue: one result line for each line, however often it is stopped."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import EngineFailure, ErrorCode
from headrace.keys import Keys
from headrace.protocol import RequestMessage
from headrace.testing import FakeWorker
from support.command import Ended, make_caller, start
from support.queue_driver import QueueDriver
from support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)

RunBatch = Callable[..., Ended]


def line(custom_id: str, prompt: str = "Hi", **body: Any) -> bytes:
    """One good line of the completions API."""
    body = {"prompt": prompt, **body}
    entry = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(entry).encode()


def results(path: Path) -> dict[str | None, dict[str, Any]]:
    """Return the result lines by custom_id; every line is strict JSON."""
    read = [json.loads(raw) for raw in path.read_bytes().splitlines()]
    return {entry["custom_id"]: entry for entry in read}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Give the paths of an input and an output."""
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def run_batch(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    redis_url: str,
    queue: Keys,
    files: tuple[Path, Path],
) -> RunBatch:
    """Give the command over the two files."""
    call = make_caller(capfd, monkeypatch)
    where = ("--redis-url", redis_url, "--queue", queue.queue)

    def run_batch(*arguments: str) -> Ended:
        return call("run-batch", "-i", str(files[0]), "-o", str(files[1]), *where, *arguments)

    return run_batch


def test_good_lines_are_answered(
    run_batch: RunBatch, redis_url: str, queue: Keys, files: tuple[Path, Path]
) -> None:
    """Each line has its answer under its id, and the command says how many."""
    files[0].write_bytes(b"\n".join(line(f"q{i}", f"prompt {i}") for i in range(40)))
    with FakeWorker(redis_url, queue=queue.queue):
        ended = run_batch()
    assert (ended.code, ended.out) == (0, "")
    assert "40 lines have a result; 0 failed" in ended.err
    found = results(files[1])
    assert len(found) == 40
    for i in range(40):
        body = found[f"q{i}"]["response"]["body"]
        assert body["choices"][0]["text"] == f"prompt {i}"
        assert body["model"] == "smollm2-135m"


def test_bad_lines_fail_alone(
    run_batch: RunBatch, redis_url: str, queue: Keys, files: tuple[Path, Path]
) -> None:
    """Whatever is wrong with a line, it gets one error line; its neighbours are answered (B38)."""
    good, bom = line("good-1"), b"\xef\xbb\xbf"
    lines = [
        *(good, b"", bom + line("good-2"), line("good-3") + b"\r", line("good-1"), b"   "),
        *(line("x").replace(b"/v1/completions", b"/v1/x"), line("t")[:-9], b"[]", b"{}"),
        *(line("big", "x" * 1_000_000), line("hot", temperature=-3), line("last")),
    ]
    files[0].write_bytes(b"\n".join(lines))
    with FakeWorker(redis_url, queue=queue.queue):
        ended = run_batch()
    written = [json.loads(raw) for raw in files[1].read_bytes().splitlines()]
    codes = Counter(entry["error"] and entry["error"]["code"] for entry in written)
    assert ended.code == 1
    assert len(written) == sum(1 for raw in lines if raw.strip())
    assert codes == {None: 5, "invalid_line": 4, "duplicate_custom_id": 1, "invalid_request": 1}


def test_a_second_run_asks_nothing_again(
    run_batch: RunBatch, redis_url: str, queue: Keys, files: tuple[Path, Path]
) -> None:
    """What is answered stays as it is; bad lines keep one error line each."""
    files[0].write_bytes(b"\n".join([line("a"), b"{}", line("b")]))
    with FakeWorker(redis_url, queue=queue.queue) as worker:
        assert run_batch().code == 1
        before = sorted(files[1].read_bytes().splitlines())
        ended = run_batch()
        assert len(worker.requests) == 2
    assert ended.code == 1
    assert "2 of them before" in ended.err
    assert sorted(files[1].read_bytes().splitlines()) == before


def test_a_mended_line_is_asked_in_the_second_run(
    run_batch: RunBatch, redis_url: str, queue: Keys, files: tuple[Path, Path]
) -> None:
    """The error of a line that never reached the queue makes room for its answer."""
    with FakeWorker(redis_url, queue=queue.queue):
        files[0].write_bytes(line("a", temperature=-1))
        assert run_batch().code == 1
        files[0].write_bytes(line("a", temperature=1))
        assert run_batch().code == 0
    assert results(files[1])["a"]["error"] is None


@pytest.mark.parametrize("code", [ErrorCode.ENGINE_FAILURE, ErrorCode.UNKNOWN_MODEL])
def test_what_a_worker_refused_is_tried_again_by_the_second_run(
    run_batch: RunBatch, redis_url: str, queue: Keys, files: tuple[Path, Path], code: ErrorCode
) -> None:
    """Its error line gives way to an answer, though Redis still knows the failed tries."""
    files[0].write_bytes(line("a"))
    with FakeWorker(redis_url, queue=queue.queue, fail_with=code):
        assert run_batch().code == 1
    assert results(files[1])["a"]["error"]["code"] == code.value
    with FakeWorker(redis_url, queue=queue.queue):
        assert run_batch().code == 0
    assert len(files[1].read_bytes().splitlines()) == 1


def test_a_passing_failure_is_mended_within_the_run(
    run_batch: RunBatch, redis_url: str, queue: Keys, files: tuple[Path, Path]
) -> None:
    """A worker that fails once costs a line a second try, not its answer."""
    tries: Counter[str] = Counter()

    def answer(request: RequestMessage) -> str:
        tries[str(request.prompt)] += 1
        if tries[str(request.prompt)] == 1:
            raise EngineFailure("once")
        return "answer"

    files[0].write_bytes(b"\n".join(line(i, i) for i in "abc"))
    with FakeWorker(redis_url, queue=queue.queue, answers=answer):
        assert run_batch().code == 0
    assert tries == {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_is_taken_up_where_it_was(
    number: signal.Signals,
    run_batch: RunBatch,
    redis_url: str,
    queue: Keys,
    files: tuple[Path, Path],
    driver: QueueDriver,
) -> None:
    """However it was stopped: nothing is lost, nothing is asked twice, no line is doubled."""
    files[0].write_bytes(b"\n".join(line(f"q{i}", "p" * 30) for i in range(60)))
    arguments = ("-i", str(files[0]), "-o", str(files[1]), "--max-in-flight", "8")
    slow = {"token_delay_s": 0.01, "max_num_seqs": 4}
    with FakeWorker(redis_url, queue=queue.queue, **slow) as first:  # type: ignore[arg-type]
        process = start(
            "run-batch", *arguments, HEADRACE_REDIS_URL=redis_url, HEADRACE_QUEUE=queue.queue
        )
        eventually(lambda: files[1].exists() and files[1].read_bytes().count(b"\n") > 5)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (-number, 128 + number)
    assert driver.depth().queued > 0  # nobody serves, so they are there however long it took
    with FakeWorker(redis_url, queue=queue.queue) as second:
        ended = run_batch("--max-in-flight", "60")
    assert len({request.request_id for request in (*first.requests, *second.requests)}) == 60
    assert ended.code == 0
    assert len(files[1].read_bytes().splitlines()) == len(results(files[1])) == 60


def test_chat_lines_and_options_reach_the_worker(
    run_batch: RunBatch, redis_url: str, queue: Keys, files: tuple[Path, Path]
) -> None:
    """Messages, sampling, model, priority and tenant are those of the line and the command."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 9,
        "temperature": 0,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 2,
    }
    entry = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    files[0].write_text(json.dumps(entry))
    with FakeWorker(redis_url, queue=queue.queue) as worker:
        assert run_batch("--tenant", "acme", "--priority", "9").code == 0
        [request] = worker.requests
    assert (request.messages, request.model, request.tenant) == (
        ({"role": "user", "content": "Hi"},),
        "m",
        "acme",
    )
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.stop, sampling.logprobs) == (9, ("x",), 2)
    choice = results(files[1])["c"]["response"]["body"]["choices"][0]
    assert len(choice["logprobs"]["content"]) == 2


def test_n_answers_come_back_in_one_line(
    run_batch: RunBatch, redis_url: str, queue: Keys, files: tuple[Path, Path]
) -> None:
    """n = 3 gives three choices, also when the line is found again in Redis."""
    files[0].write_bytes(line("a", n=3))
    with FakeWorker(redis_url, queue=queue.queue) as worker:
        assert run_batch().code == 0
        files[1].unlink()
        assert run_batch().code == 0
        assert len(worker.requests) == 3
    choices = results(files[1])["a"]["response"]["body"]["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        (0, "Hi"),
        (1, "Hi"),
        (2, "Hi"),
    ]


def test_results_can_go_to_stdout(
    run_batch: RunBatch, redis_url: str, queue: Keys, files: tuple[Path, Path]
) -> None:
    """A dash writes the lines to the pipe, and nothing else gets between them."""
    files[0].write_bytes(b"\n".join([line("a"), line("b")]))
    with FakeWorker(redis_url, queue=queue.queue):
        ended = run_batch("-o", "-")
    assert sorted(json.loads(raw)["custom_id"] for raw in ended.out.splitlines()) == ["a", "b"]


def test_an_empty_file_is_done_at_once(run_batch: RunBatch, files: tuple[Path, Path]) -> None:
    """Nothing to do is no failure."""
    files[0].write_bytes(b"\n\n")
    ended = run_batch()
    assert ended.code == 0
    assert "0 lines have a result" in ended.err


def test_input_and_output_must_be_two_files(run_batch: RunBatch, files: tuple[Path, Path]) -> None:
    """The input is never written to."""
    files[0].write_bytes(line("a"))
    ended = run_batch("-o", str(files[0]))
    assert ended.code == 2
    assert "both input and output" in ended.err
    assert files[0].read_bytes() == line("a")

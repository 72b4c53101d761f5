"""The commands on a real server: what they print, where, and with which exit code."""

from __future__ import annotations

import json
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace.cli import main as entry
from headrace.errors import ErrorCode
from headrace.keys import Keys
from headrace.protocol import decode_request
from headrace.testing import FakeWorker
from support.command import Ended, start
from support.command_fixtures import Headrace
from support.queue_driver import QueueDriver
from support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)


def test_generate_prints_the_answer_and_says_how_long_it_took(
    headrace: Headrace, redis_url: str, queue: Keys
) -> None:
    """The answer alone is on stdout; counts and times are on stderr."""
    with FakeWorker(redis_url, queue=queue.queue, answers={"Why?": "Because."}):
        ended = headrace("generate", "Why?")
    assert (ended.code, ended.out) == (0, "Because.\n")
    assert "8 tokens after 4" in ended.err
    assert "TTFT" in ended.err


def test_generate_speaks_in_the_chat_template_unless_it_is_raw(
    headrace: Headrace, redis_url: str, queue: Keys
) -> None:
    """A prompt is a user's message, behind the system's if there is one; --raw sends it bare."""
    with FakeWorker(redis_url, queue=queue.queue) as worker:
        headrace("generate", "Hi", "--system", "Be brief.")
        headrace("generate", "Hi", "--raw")
        chat, raw = worker.requests
    assert chat.prompt is None
    assert chat.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    )
    assert (raw.prompt, raw.messages) == ("Hi", None)


def test_sampling_flags_and_variables_reach_the_worker(
    headrace: Headrace, redis_url: str, queue: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each flag is also a variable, and a flag wins over its variable."""
    monkeypatch.setenv("HEADRACE_TOP_K", "3")
    monkeypatch.setenv("HEADRACE_SEED", "1")
    flags = ["--max-tokens", "2", "--temperature", "0", "--seed", "7", "--stop", "a", "--stop", "b"]
    with FakeWorker(redis_url, queue=queue.queue) as worker:
        assert headrace("generate", "Hi there", *flags).out == "Hi\n"
        sampling = worker.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature) == (2, 0)
    assert (sampling.top_k, sampling.seed, sampling.stop) == (3, 7, ("a", "b"))


@pytest.mark.parametrize(
    ("flags", "form"),
    [
        (["--regex", "[0-9]+"], {"type": "regex", "regex": "[0-9]+"}),
        (["--choice", "a", "--choice", "b c"], {"type": "choice", "choice": ["a", "b c"]}),
        (
            ["--json-schema", "schema.json"],
            {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        ),
    ],
)
def test_flags_of_the_form_reach_the_worker(
    headrace: Headrace,
    driver: QueueDriver,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: list[str],
    form: dict[str, object],
) -> None:
    """A schema comes from its file; the other options stand beside it."""
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    monkeypatch.chdir(tmp_path)
    others = ["--bad-word", "x", "--bad-word", "y z", "--include-stop", "--echo"]
    assert headrace("enqueue", "Hi", *flags, *others).code == 0
    sampling = decode_request(driver.grant().payload).sampling
    assert sampling.response_format == form
    assert (sampling.bad_words, sampling.include_stop) == (("x", "y z"), True)
    assert sampling.echo is True


def test_generate_prints_an_echoed_prompt_first(
    headrace: Headrace, redis_url: str, queue: Keys
) -> None:
    """The prompt stands before the answer, on stdout."""
    with FakeWorker(redis_url, queue=queue.queue, answers={"One,": " two."}):
        assert headrace("generate", "One,", "--raw", "--echo").out == "One, two.\n"


def test_generate_reads_a_prompt_from_stdin(
    headrace: Headrace,
    redis_url: str,
    queue: Keys,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A dash stands for what comes through the pipe, line feeds and all."""
    (tmp_path / "prompt").write_text("two\nlines")
    with (tmp_path / "prompt").open() as stdin, FakeWorker(redis_url, queue=queue.queue):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert headrace("generate", "-", "--quiet") == Ended(0, "two\nlines\n", "")


def test_a_refused_request_is_one_line_and_code_one(
    headrace: Headrace, redis_url: str, queue: Keys
) -> None:
    """The worker's "no" is shown without a traceback."""
    refusal = ErrorCode.CONTEXT_LENGTH_EXCEEDED
    with FakeWorker(redis_url, queue=queue.queue, fail_with=refusal):
        ended = headrace("generate", "Hi")
    assert ended.code == 1
    assert ended.err.startswith("headrace: request ")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("generate", "Hi", "--top-p", "3"), "top_p must be in [0, 1], not 3.0"),
        (("generate", "Hi", "--temperature", "nan"), "temperature must be a finite number"),
        (("generate", "Hi", "--regex", "a", "--choice", "b"), "give one of --regex, --choice"),
        (("enqueue", "Hi", "--json-schema", "/no/such"), "/no/such: No such file"),
        (("enqueue", "Hi", "--bad-word", ""), "bad_words must hold strings"),
        (("generate", " "), "the prompt is empty"),
        (("generate", "Hi", "--raw", "--system", "x"), "--raw leaves out"),
        (("generate", "Hi", "--queue", "a b"), "'a b'"),
        (("generate", "Hi", "--redis-url", "http://x"), "http://x"),
        (("generate", "Hi", "--ttl", "soon"), "'soon' is not a duration"),
        (("generate", "Hi", "--ttl", "0"), "ttl must be a positive number of seconds"),
        (("enqueue", "Hi", "--ttl", "0s"), "ttl must be a positive number of seconds"),
        (("generate",), "Missing argument"),
        (("status", "--nope"), "--nope"),
        (("dlq", "purge"), "name entries, or give --all"),
        (("dlq", "replay", "1-0", "--all"), "name entries, or give --all"),
        (("dlq", "replay", "nope"), "'nope' is no entry id"),
        (("run-batch", "-i", "/no/such", "-o", "x.jsonl"), "/no/such is not a file"),
        (("nothing",), "nothing"),
    ],
)
def test_wrong_usage_is_code_two(
    headrace: Headrace, arguments: tuple[str, ...], named: str
) -> None:
    """What is wrong is named, nothing is done, and there is no traceback."""
    ended = headrace(*arguments)
    assert ended.code == 2
    assert named in " ".join(ended.err.replace("│", " ").split())
    assert "Traceback" not in ended.err


def test_an_unreachable_server_is_code_three(headrace: Headrace, tmp_path: Path) -> None:
    """Whatever the command, the exit code tells that Redis is the trouble."""
    ended = headrace("status", "--redis-url", f"unix://{tmp_path}/none.sock")
    assert ended.code == 3
    assert ended.err.startswith("headrace: Redis: ")


def test_enqueue_prints_an_id_that_attach_takes(
    headrace: Headrace, redis_url: str, queue: Keys
) -> None:
    """A request can be asked now and read later, all of it or its end."""
    request_id = headrace("enqueue", "Hello").out.strip()
    with FakeWorker(redis_url, queue=queue.queue):
        assert headrace("attach", request_id).out == "Hello\n"
    assert headrace("attach", request_id, "--after", "3").out == "lo\n"


def test_an_id_of_ones_own_makes_asking_idempotent(headrace: Headrace, driver: QueueDriver) -> None:
    """The same again is the same request; another prompt under the id is a conflict."""
    ask = ("enqueue", "--request-id", "order-42")
    assert headrace(*ask, "Hello") == Ended(0, "order-42\n", "")
    assert headrace(*ask, "Hello").code == 0
    ended = headrace(*ask, "Goodbye")
    assert (ended.code, ended.out) == (1, "")
    assert "order-42" in ended.err
    headrace("cancel", "order-42")


def test_an_unknown_id_is_code_one(headrace: Headrace) -> None:
    """Every command about one request says that the queue does not know it."""
    for command in ("attach", "status", "cancel", "finish"):
        ended = headrace(command, "nobody")
        assert ended.code == 1
        assert "'nobody'" in ended.err


def test_status_and_cancel_follow_a_request(headrace: Headrace) -> None:
    """A queued request is shown as such, and cancelled at once."""
    headrace("enqueue", "Hello", "--request-id", "r1", "--tenant", "acme", "--priority", "2")
    known = json.loads(headrace("status", "r1", "--tenant", "acme", "--json").out)
    assert (known["state"], known["priority"], known["num_tokens"]) == ("queued", 2, 0)
    ended = headrace("cancel", "r1", "--tenant", "acme")
    assert "request r1 is cancelled" in ended.err
    shown = headrace("status", "r1", "--tenant", "acme").out
    assert "state\tcancelled" in shown
    assert f"enqueued_at\t{datetime.now(UTC):%Y-}" in shown


def test_finish_ends_a_request_with_an_answer(headrace: Headrace) -> None:
    """A queued request has nothing to say, and attach reads that as an answer."""
    headrace("enqueue", "Hello", "--request-id", "r1")
    assert "request r1 is finished" in headrace("finish", "r1").err
    ended = headrace("attach", "r1")
    assert (ended.code, ended.out) == (0, "\n")
    assert "finish: stopped_early" in ended.err


def test_reprioritise_moves_a_request(headrace: Headrace, driver: QueueDriver) -> None:
    """It waits in its new lane, and a priority that does not exist is a wrong usage."""
    headrace("enqueue", "Hello", "--request-id", "r1")
    assert "request r1 has priority 1" in headrace("reprioritise", "r1", "1").err
    assert driver.depth().queued_by_lane == {1: 1}
    assert headrace("reprioritise", "r1", "10").code == 2
    headrace("finish", "r1")
    assert "finished already" in headrace("reprioritise", "r1", "2").err


def test_ctrl_c_cancels_what_generate_asked(
    redis_url: str, queue: Keys, driver: QueueDriver
) -> None:
    """An interrupted command leaves with 130, and its request is not left running."""
    where = ("--redis-url", redis_url, "--queue", queue.queue)
    process = start("generate", "Hi", *where)
    eventually(lambda: driver.depth().queued == 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "")
    assert driver.depth().queued == 0


def test_ctrl_c_leaves_running_what_attach_reads(
    redis_url: str, queue: Keys, driver: QueueDriver, headrace: Headrace
) -> None:
    """attach only looks: the request stays queued when it is interrupted or terminated."""
    headrace("enqueue", "Hi", "--request-id", "r1")
    process = start("attach", "r1", "--redis-url", redis_url, "--queue", queue.queue)
    eventually(lambda: len(driver.client.client_list()) > 3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (143, -signal.SIGTERM)
    assert driver.depth().queued == 1
    headrace("cancel", "r1")


def test_without_the_extra_the_command_says_how_to_get_it(
    server: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend that installed only the client gets one line, no traceback."""
    monkeypatch.setattr(entry, "NEEDED_MODULES", ("typer", "no_such_module"))
    with pytest.raises(SystemExit, match="2"):
        entry.main()
    assert capsys.readouterr().err == (
        "headrace: the command is not installed (no_such_module missing): "
        "pip install 'headrace[cli]'\n"
    )

"""Logs: events have constant names, lines are JSON, and nothing of users is in them."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import structlog

import headrace_worker
from headrace.errors import ErrorCode
from headrace_worker import logs
from headrace_worker.serving.request import End
from support.serving_parts import Books

# The events that exist, by level: what a person who reads logs can rely on.
EVENTS = {
    "info": {
        *("worker.started", "worker.draining", "worker.stopped", "model.loaded"),
        *("kv_cache.allocated", "redis.reconnected", "request.finished", "kernels.built"),
    },
    "warning": {
        *("redis.disconnected", "delivery.reclaimed", "request.rejected", "request.cancelled"),
        *("sequence.preempted", "reader.slow", "request.dropped", "stream.rolled_back"),
        *("redis.unsafe", "lane.skipped", "kernels.missing"),
    },
    "error": {
        *("request.failed", "request.dead_lettered", "engine.step_failed", "engine.stalled"),
        "worker.stopped",  # as info when it was told to, as error when it cannot go on
    },
    "debug": {
        *("request.received", "request.admitted", "request.first_token", "engine.stepped"),
    },
}
CONSTANTS = {
    name: value
    for name, value in vars(logs).items()
    if name.isupper() and isinstance(value, str) and not name.startswith("_")
}
SOURCE = Path(headrace_worker.__file__).parent
METHODS = {name: name for name in EVENTS} | {"exception": "error", "critical": "error"}
TEXT_OF_USERS = {"text", "prompt", "messages", "piece", "pieces", "content", "output", "payload"}


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Give the process its logging back after each test."""
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    structlog.reset_defaults()


def _log_calls() -> list[tuple[str, ast.Call]]:
    """Return every call of a logger in the worker's source, with its place."""
    return [
        (f"{path.relative_to(SOURCE)}:{node.lineno}", node)
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in METHODS
        and re.search(r"log(ger)?$", ast.unparse(node.func.value).removesuffix("()"))
    ]


def _event_of(call: ast.Call) -> str | None:
    """Return the event that a call names by a constant of the logs module, else None."""
    if not call.args:
        return None
    match call.args[0]:
        case ast.Attribute(value=ast.Name(id="logs"), attr=name) | ast.Name(id=name):
            return CONSTANTS.get(name)
    return None


def test_the_events_are_the_documented_ones() -> None:
    """Every documented event is a constant, and there are no others."""
    assert set(CONSTANTS.values()) == set().union(*EVENTS.values())
    assert all(re.fullmatch(r"[a-z_]+\.[a-z_]+", event) for event in CONSTANTS.values())
    assert all(name == event.replace(".", "_").upper() for name, event in CONSTANTS.items())


def test_only_constants_are_logged() -> None:
    """No event is spelled out, interpolated or made up where it is logged."""
    assert [place for place, call in _log_calls() if _event_of(call) is None] == []


def test_every_event_has_its_level() -> None:
    """An event is always logged at the level that the documents give it."""
    wrong = [
        f"{place} {event}"
        for place, call in _log_calls()
        if (event := _event_of(call)) is not None
        and event not in EVENTS[METHODS[ast.unparse(call.func).rsplit(".", 1)[1]]]
    ]
    assert wrong == []


def test_no_text_of_users_is_logged() -> None:
    """No fact is named like a prompt or an output."""
    named = {keyword.arg for _, call in _log_calls() for keyword in call.keywords}
    assert named & TEXT_OF_USERS == set()


def test_the_walk_sees_what_it_looks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The three tests above can fail: a wrong call is found in a folder that has one."""
    (tmp_path / "wrong.py").write_text("self._log.info(f'x {y}', prompt=p)\nlog.info('free.text')")
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert [_event_of(call) for _, call in _log_calls()] == [None, None]


def _line(level: logs.LogLevel = "info", **facts: object) -> dict[str, object]:
    stream = io.StringIO()
    logs.configure_logs(level, "json", stream)
    logs.get_logger(worker_id="w-1").info(logs.REQUEST_FINISHED, **facts)
    (line,) = stream.getvalue().splitlines()
    parsed: dict[str, object] = json.loads(line)
    return parsed


def test_a_line_is_one_json_object() -> None:
    """Name, level, facts and what was bound are keys."""
    line = _line(request_id="r-1", queue_s=0.5, finish_reason="stop")
    assert line["event"] == "request.finished"
    assert line["level"] == "info"
    assert (line["worker_id"], line["request_id"], line["queue_s"]) == ("w-1", "r-1", 0.5)


def test_times_are_utc_in_iso_8601() -> None:
    """A line can be put in order with those of other machines."""
    timestamp = datetime.fromisoformat(str(_line()["timestamp"]))
    assert timestamp.utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:hunter2@queue:6379/0", "redis://user:***@queue:6379/0"),
        ("rediss://:hunter2@queue", "rediss://:***@queue"),
        ("redis://queue:6379/0", "redis://queue:6379/0"),
        ("unix:///run/queue.sock?db=0", "unix:///run/queue.sock?db=0"),
        ("redis://:hun@ter2@queue", "redis://:***@queue"),
        (
            "unix:///run/queue.sock?password=hunter2&db=0",
            "unix:///run/queue.sock?password=***&db=0",
        ),
        (
            "redis+sentinel://a/m?sentinel_password=hunter2",
            "redis+sentinel://a/m?sentinel_password=***",
        ),
        ("no: redis://a:p@b and redis://c:q@d", "no: redis://a:***@b and redis://c:***@d"),
    ],
)
def test_passwords_are_cut_out_of_urls(url: str, shown: str) -> None:
    """Whatever fact holds a URL, its password is not in the line."""
    assert logs.without_password(url) == shown
    assert _line(url=url)["url"] == shown


def test_an_exception_is_part_of_its_line() -> None:
    """A traceback is a fact of one line, not many lines."""
    stream = io.StringIO()
    logs.configure_logs("info", "json", stream)
    try:
        raise ValueError("at redis://u:hunter2@h")
    except ValueError:
        logs.get_logger().exception(logs.ENGINE_STEP_FAILED)
    (line,) = stream.getvalue().splitlines()
    assert "ValueError" in json.loads(line)["exception"]
    assert "hunter2" not in line


def test_less_than_the_level_is_not_logged() -> None:
    """Debug lines cost nothing unless they are asked for."""
    stream = io.StringIO()
    logs.configure_logs("warning", "json", stream)
    logs.get_logger().info(logs.WORKER_STARTED)
    assert stream.getvalue() == ""
    logs.configure_logs("debug", "json", stream)
    logs.get_logger().debug(logs.ENGINE_STEPPED)
    assert json.loads(stream.getvalue())["event"] == "engine.stepped"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("log_format", "stream", "is_json"),
    [
        ("auto", io.StringIO(), True),
        ("auto", _Terminal(), False),
        ("json", _Terminal(), True),
        ("console", io.StringIO(), False),
    ],
)
def test_lines_are_json_unless_a_person_watches(
    log_format: logs.LogFormat, stream: io.StringIO, is_json: bool
) -> None:
    """A terminal gets coloured lines, everything else JSON, and a setting decides otherwise."""
    logs.configure_logs("info", log_format, stream)
    logs.get_logger().info(logs.WORKER_STARTED, model="tiny")
    assert stream.getvalue().startswith("{") is is_json
    assert "tiny" in stream.getvalue()


def test_libraries_log_in_the_same_form() -> None:
    """A warning of asyncio or redis is a JSON line with the library's name."""
    stream = io.StringIO()
    logs.configure_logs("info", "json", stream)
    logging.getLogger("redis").warning("lost %s", "redis://u:hunter2@h")
    logging.getLogger("redis").info("chatter")
    (line,) = stream.getvalue().splitlines()
    parsed = json.loads(line)
    assert (parsed["logger"], parsed["level"]) == ("redis", "warning")
    assert parsed["event"] == "lost redis://u:***@h"


async def test_a_refusal_that_quotes_the_prompt_is_not_logged_with_it() -> None:
    """The message goes to whoever asked; the log has its code."""
    books = Books()
    with structlog.testing.capture_logs() as lines:
        request = books.running()
        quoting = End.failed(ErrorCode.INVALID_REQUEST, "content must be text, not {'my secret'}")
        books.ledger.end(request, quoting)
        await books.ledger.finish(request)
    assert books.queue.ended["r1"].error_message == quoting.message
    assert "request.rejected" in {line["event"] for line in lines}
    assert "secret" not in str(lines)

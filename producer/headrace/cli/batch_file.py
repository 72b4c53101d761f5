"""Reading OpenAI batch lines: every non-blank line becomes a request or a refusal, never a crash.

A line is ``{"custom_id": …, "method": "POST", "url": …, "body": {…}}``. What a body may hold is in
batch_body.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from headrace.checks import shown
from headrace.cli.batch_body import CHAT_URL, COMPLETIONS_URL, BatchBody, read_body
from headrace.cli.batch_json import parse_line
from headrace.errors import InvalidRequest

MAX_LINE_BYTES = 4 * 1024 * 1024  # twice the largest payload of the queue
MAX_MESSAGE_LENGTH = 400  # characters
LINE_KEYS = ("custom_id", "method", "url", "body")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that can be asked."""

    line_number: int  # from 1
    custom_id: str
    url: str  # CHAT_URL or COMPLETIONS_URL
    body: BatchBody


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be asked; it is answered with one error line."""

    line_number: int  # from 1
    custom_id: str | None  # None where none can be read
    code: str  # invalid_line, duplicate_custom_id or invalid_request
    message: str  # names the line and the value


class _Refusal(Exception):
    """Why a line is refused; its arguments are code and message."""


def read_lines(
    stream: BinaryIO, default_max_tokens: int | None = None
) -> Iterator[BatchRequest | BadLine]:
    """Yield one item per non-blank line, in order, holding one line in memory at a time.

    BOM and CRLF are accepted, duplicates of a ``custom_id`` after its first line are refused.
    ``default_max_tokens`` applies to lines that name none.
    """
    seen: set[bytes] = set()  # digests: a million long ids would not fit as text
    for line_number, line in _raw_lines(stream):
        if line is not None and not line.strip():
            continue
        yield _read_line(line_number, line, seen, default_max_tokens)


def id_digest(custom_id: str) -> bytes:
    """Return what stands for a custom_id in sets of many."""
    return hashlib.blake2b(custom_id.encode(), digest_size=12).digest()


def shorten(message: str) -> str:
    """Return a message without the bulk of a value that it quotes."""
    if len(message) <= MAX_MESSAGE_LENGTH:
        return message
    return f"{message[:MAX_MESSAGE_LENGTH]}… ({len(message)} characters)"


def _raw_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield numbered lines; None stands for one that is too long to be read."""
    line_number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        line_number += 1
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE_BYTES)
            yield line_number, None
        else:
            yield line_number, line.removeprefix(BOM)


def _read_line(
    line_number: int, line: bytes | None, seen: set[bytes], default_max_tokens: int | None
) -> BatchRequest | BadLine:
    custom_id: str | None = None
    try:
        entry, fault = _parse(line)
        if fault is not None and not isinstance(entry.get("custom_id"), str):
            raise _Refusal("invalid_line", fault)
        custom_id = _custom_id(entry)
        digest = id_digest(custom_id)
        if digest in seen:
            raise _Refusal("duplicate_custom_id", f"custom_id {custom_id!r} was used before")
        seen.add(digest)
        if fault is not None:
            raise _Refusal("invalid_line", fault)
        url = _url(entry)
        return BatchRequest(
            line_number, custom_id, url, read_body(url, entry.get("body"), default_max_tokens)
        )
    except _Refusal as refusal:
        code, message = refusal.args
    except InvalidRequest as error:
        code, message = error.code.value, error.message
    return BadLine(line_number, custom_id, code, shorten(f"line {line_number}: {message}"))


def _parse(line: bytes | None) -> tuple[dict[str, Any], str | None]:
    """Return what the line holds, and why it cannot be used, if so."""
    if line is None:
        return {}, f"longer than {MAX_LINE_BYTES} bytes"
    parsed = parse_line(line)
    return parsed.entry, parsed.fault


def _custom_id(entry: dict[str, Any]) -> str:
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise _Refusal("invalid_line", f"custom_id must be a non-empty string, not {custom_id!r}")
    try:
        custom_id.encode()
    except UnicodeEncodeError as error:
        raise _Refusal("invalid_line", f"custom_id {custom_id!a} is not Unicode text") from error
    return custom_id


def _url(entry: dict[str, Any]) -> str:
    for name in entry:
        if name not in LINE_KEYS:  # an option here, not in the body, would be lost without a word
            raise _Refusal("invalid_line", f"unknown key {shown(name)} beside body")
    method, url = entry.get("method"), entry.get("url")
    if method != "POST":
        raise _Refusal("invalid_line", f"method must be 'POST', not {method!r}")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise _Refusal(
            "invalid_line", f"url must be {CHAT_URL!r} or {COMPLETIONS_URL!r}, not {url!r}"
        )
    return str(url)

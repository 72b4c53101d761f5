"""Running the programs of examples/ as a reader of the README would: as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import httpx

from support.repository import ROOT
from support.servers import free_port
from support.waiting import PATIENCE_S, eventually


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    name: str
    data: dict[str, str]
    offset: int | None  # the event's id, where it has one


def start(*command: str, **environ: str) -> subprocess.Popen[str]:
    """Start a Python program in the repository's root."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*command: str, **environ: str) -> str:
    """Run a Python program to its end; return what it printed. It must succeed."""
    process = start(*command, **environ)
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


@contextlib.contextmanager
def backend(redis_url: str, **environ: str) -> Iterator[str]:
    """Serve examples/sse_server.py as its docstring says; yield its address."""
    port = str(free_port())
    command = ["-m", "uvicorn", "--app-dir", "examples", "--port", port, "sse_server:app"]
    process = start(*command, REDIS_URL=redis_url, **environ)
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: _is_up(process, url))
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


async def read_events(response: httpx.Response) -> AsyncIterator[Event]:
    """Parse a response of server-sent events as they come."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
            continue
        offset = int(fields["id"]) if "id" in fields else None
        yield Event(fields["event"], json.loads(fields["data"]), offset)
        fields = {}


def _is_up(process: subprocess.Popen[str], url: str) -> bool:
    assert process.poll() is None, process.communicate()[1]
    try:
        return httpx.get(f"{url}/healthz").is_success
    except httpx.TransportError:
        return False

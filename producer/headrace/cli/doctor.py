"""``headrace doctor``: looks at the server, the functions and the machine, and says how to mend."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import redis.asyncio
import typer
from redis import exceptions
from rich.text import Text

from headrace.cli import options, render
from headrace.cli.exits import ExitCode
from headrace.cli.running import run
from headrace.cli.served import Place, served
from headrace.cli.supervisor import worker_environment, worker_program
from headrace.cli.workers import list_workers
from headrace.errors import ConfigurationError, TransportError
from headrace.functions import LIBRARY, depth
from headrace.functions import run as call
from headrace.keys import Keys

FLOOR = {"redis": (7, 0), "valkey": (7, 2)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool | None  # None: worth knowing, nothing wrong
    detail: str
    mend: str = ""  # what to do unless ok

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Finding:
        """Read what the worker package found."""
        return cls(values["name"], values["ok"], values["detail"], values["mend"])


def doctor(
    *,
    redis_url: options.RedisUrl = None,
    queue: options.Queue = options.DEFAULT_QUEUE,
    model: options.Model = options.DEFAULT_MODEL,
    device: Annotated[str, options.option("--device", "auto, cpu, cuda, cuda:1.")] = "auto",
    dtype: Annotated[str, options.option("--dtype", "auto, float32, bfloat16, float16.")] = "auto",
    quantization: Annotated[
        str, options.option("--quantization", "none, int8, fp8: of the layers' weights.")
    ] = "none",
    attention_backend: Annotated[
        str | None, options.option("--attention-backend", "Judge this one; otherwise the best.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, options.option("--tensor-parallel-size", "GPUs that the model is cut over.", min=1)
    ] = 1,
    enforce_eager: Annotated[
        bool, options.option("--enforce-eager/--no-enforce-eager", "Without CUDA graphs.")
    ] = False,
    async_scheduling: Annotated[
        bool, options.option("--async-scheduling/--no-async-scheduling", "A step ahead, on a GPU.")
    ] = True,
) -> None:
    """Check the server, its settings, the queue's functions, the workers, the device and the model.

    Exit code 1 when something is wrong; each line says what, and how to mend it.
    """
    with served(redis_url, queue) as place:
        flags = ["--model", model, "--device", device, "--dtype", dtype]
        flags += ["--quantization", quantization]
        if attention_backend is not None:
            flags += ["--attention-backend", attention_backend]
        flags += ["--tensor-parallel-size", str(tensor_parallel_size)]
        flags += ["--enforce-eager"] * enforce_eager
        flags += ["--no-async-scheduling"] * (not async_scheduling)
        raise typer.Exit(run(_examine(place, flags)))


async def _examine(place: Place, flags: list[str]) -> ExitCode:
    async with place.connected() as client:
        findings = await look_at_server(client, place.keys)
    findings += await _look_at_machine(flags)
    for finding in findings:
        _show(finding)
    is_wrong = any(finding.ok is False for finding in findings)
    return ExitCode.FAILED if is_wrong else ExitCode.OK


async def look_at_server(client: redis.asyncio.Redis, keys: Keys) -> list[Finding]:
    """Return what there is to say about a server; it may be unreachable, or refuse some things."""
    found = []
    try:
        info: dict[str, Any] = await client.info("all")
        found += [_version(info), _eviction(info), _persistence(info), _memory(info)]
    except exceptions.ResponseError as error:
        found.append(Finding("server", False, str(error), "let this user call INFO"))
    except (exceptions.RedisError, OSError) as error:
        mend = "start it, or correct --redis-url"
        return [Finding("server", False, f"unreachable: {error or type(error).__name__}", mend)]
    found.append(await _functions(client, keys))
    found.append(await _workers(client, keys))
    return found


def _version(info: Mapping[str, Any]) -> Finding:
    name = "valkey" if "valkey_version" in info else "redis"
    version = str(info.get(f"{name}_version", "0"))
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    floor = ".".join(map(str, FLOOR[name]))
    return Finding(
        "server",
        numbers >= FLOOR[name],
        f"{name} {version}, {info.get('redis_mode') or info.get('server_mode', 'standalone')}",
        f"upgrade to {name} {floor} or newer",
    )


def _eviction(info: Mapping[str, Any]) -> Finding:
    policy = info.get("maxmemory_policy", "unknown")
    mend = "CONFIG SET maxmemory-policy noeviction: under any other, queued requests vanish"
    return Finding("eviction", policy == "noeviction", f"maxmemory-policy {policy}", mend)


def _persistence(info: Mapping[str, Any]) -> Finding:
    if not info.get("aof_enabled"):
        mend = "CONFIG SET appendonly yes: without it, a restart loses the queue"
        return Finding("persistence", False, "the append-only file is off", mend)
    status = info.get("aof_last_write_status", "ok")
    mend = "look at the server's disk and log"
    return Finding("persistence", status == "ok", f"append-only file on, last write {status}", mend)


def _memory(info: Mapping[str, Any]) -> Finding:
    used, limit = info.get("used_memory_human", "?"), info.get("maxmemory", 0)
    if not limit:
        return Finding("memory", None, f"{used} used, no limit set")
    share = info.get("used_memory", 0) / limit
    detail = f"{used} of {info.get('maxmemory_human', limit)} used"
    return Finding("memory", share < 0.9, detail, "raise maxmemory: when it is full, enqueue fails")


async def _functions(client: redis.asyncio.Redis, keys: Keys) -> Finding:
    """Call one of them, which loads the library where it is missing."""
    try:
        counts = await call(client, depth(keys))
    except TransportError as error:
        mend = "let this user call FUNCTION LOAD, or load the library as an administrator"
        return Finding("functions", False, f"{LIBRARY}: {error}", mend)
    detail = f"{LIBRARY} answers: {counts.queued} queued, {counts.running} running"
    return Finding("functions", True, detail)


async def _workers(client: redis.asyncio.Redis, keys: Keys) -> Finding:
    try:
        workers = await list_workers(client, keys)
    except TransportError as error:
        return Finding("workers", False, str(error), "let this user call TIME and read heartbeats")
    if not workers:
        return Finding("workers", None, f"none serves queue {keys.queue!r} now")
    names = ", ".join(f"{w.worker_id} ({w.facts.get('model', '?')})" for w in workers)
    return Finding("workers", True, f"{len(workers)}: {names}")


async def _look_at_machine(flags: list[str]) -> list[Finding]:
    """Let the worker package look, in a process of its own: importing it takes seconds.

    ``flags`` are those of a worker that say what it would run, and on what.
    """
    try:
        worker_program()
    except ConfigurationError as error:
        return [Finding("worker", None, str(error))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace_worker.doctor", *flags),
        env=worker_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        mend = "reinstall it: pip install 'headrace[worker]'"
        return [Finding("worker", False, " ".join(last) or "it does not start", mend)]
    return [Finding.from_values(values) for values in json.loads(output)]


def _show(finding: Finding) -> None:
    mark, style = _MARKS[finding.ok]
    mend = f"\n    mend: {finding.mend}" if finding.ok is False else ""
    render.write_text(Text.assemble((mark, style), f" {finding.name:<12} {finding.detail}{mend}"))


_MARKS: dict[bool | None, tuple[str, str]] = {
    True: ("ok  ", "green"),
    None: ("note", "yellow"),
    False: ("BAD ", "bold red"),
}

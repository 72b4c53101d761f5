"""What a worker's /metrics page says during a run: the steps, and how full the KV cache was."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from types import TracebackType
from typing import Self

LOOK_EVERY_S = 0.2
TIMEOUT_S = 2.0

_SAMPLE = re.compile(r"^(headrace_\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run did to the engine; 0 where nothing was seen."""

    num_steps: float = 0
    num_step_tokens: float = 0  # computed in all steps, prefill and decode
    num_step_sequences: float = 0  # sum over all steps
    peak_kv_usage: float = 0  # share of blocks, 0 to 1, of the samples
    mean_kv_usage: float = 0

    @property
    def tokens_a_step(self) -> float:
        """Mean tokens in a step."""
        return self.num_step_tokens / max(self.num_steps, 1)

    @property
    def sequences_a_step(self) -> float:
        """Mean sequences in a step."""
        return self.num_step_sequences / max(self.num_steps, 1)


class MetricsWatch:
    """Looks at the page of a worker on this machine while its ``async with`` block lasts."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._kv_usages: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._first = await self.look()
        self._kv_usages.clear()
        self._task = asyncio.ensure_future(self._keep_looking())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    async def look(self) -> dict[str, float]:
        """Read the page once; an unreachable one changes nothing."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                self._last = parse_samples(await _fetch(self._port))
            self._kv_usages.append(self._last.get("headrace_kv_cache_usage_perc", 0.0))
        return self._last

    def seen(self) -> Seen:
        """Return what happened between the first look and the last."""
        usages = self._kv_usages or [0.0]
        return Seen(
            num_steps=self._growth("headrace_engine_step_seconds_count"),
            num_step_tokens=self._growth("headrace_scheduled_tokens_total"),
            num_step_sequences=self._growth("headrace_scheduled_sequences_total"),
            peak_kv_usage=max(usages),
            mean_kv_usage=sum(usages) / len(usages),
        )

    def _growth(self, name: str) -> float:
        return self._last.get(name, 0.0) - self._first.get(name, 0.0)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()


def parse_samples(page: str) -> dict[str, float]:
    """Return the samples of Prometheus's text format by name, labels added up."""
    samples: dict[str, float] = {}
    for name, value in _SAMPLE.findall(page):
        samples[name] = samples.get(name, 0.0) + float(value)
    return samples


async def _fetch(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return (await reader.read()).decode(errors="replace")
    finally:
        writer.close()

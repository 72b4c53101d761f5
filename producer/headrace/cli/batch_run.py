"""The run over a batch: a bounded window of requests, each asked until it has a result line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from headrace.cli.batch_file import BadLine, BatchRequest, id_digest
from headrace.cli.batch_id import request_id
from headrace.cli.batch_result import answer_line, error_line
from headrace.cli.result_file import EarlierRun
from headrace.errors import ErrorCode, InvalidRequest, Overloaded, RequestError
from headrace.types import Completion

MAX_ATTEMPTS = 3  # of one line in one run
YIELD_EVERY = 64  # lines, so that a long row of answered ones does not stall the requests

Ask = Callable[[BatchRequest, str], Awaitable[Completion]]
"""Asks a line under a request id and returns its answer; attaches where the id is known."""


@dataclass(slots=True)
class BatchCounts:
    """How far a run is; changes while it goes on."""

    num_skipped: int = 0  # answered by an earlier run
    num_answered: int = 0
    num_failed: int = 0  # lines of this run that ended in an error
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_in_flight: int = 0

    @property
    def num_done(self) -> int:
        """Lines that have a result line."""
        return self.num_skipped + self.num_answered + self.num_failed


class BatchRun:
    """One run; touched on the event loop only."""

    def __init__(
        self,
        ask: Ask,
        write: Callable[[dict[str, Any]], None],
        *,
        batch: str,
        model: str,
        max_in_flight: int,
        earlier: EarlierRun,
    ) -> None:
        self._ask = ask
        self._write = write
        self._batch = batch
        self._model = model
        self._max_in_flight = max_in_flight
        self._earlier = earlier
        self.counts = BatchCounts()

    async def run(self, lines: Iterable[BatchRequest | BadLine]) -> BatchCounts:
        """Answer every line that has no answer yet; raises TransportError when Redis stays away."""
        running: set[asyncio.Task[None]] = set()
        try:
            for number, item in enumerate(lines):
                if number % YIELD_EVERY == 0:
                    await asyncio.sleep(0)
                if not self._take(item):
                    continue
                assert isinstance(item, BatchRequest)
                if len(running) >= self._max_in_flight:
                    running = await _wait_for_any(running)
                running.add(asyncio.ensure_future(self._answer(item)))
            while running:
                running = await _wait_for_any(running)
        finally:
            # What is in flight stays in Redis: the next run attaches to it.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return self.counts

    def _take(self, item: BatchRequest | BadLine) -> bool:
        """Return whether a line has to be asked; count one that has not, and answer a bad one."""
        if isinstance(item, BatchRequest):
            is_answered = id_digest(item.custom_id) in self._earlier.answered
            self.counts.num_skipped += is_answered
            return not is_answered
        self._fail(item.line_number, item.custom_id, item.code, item.message)
        return False

    async def _answer(self, request: BatchRequest) -> None:
        first = self._earlier.attempts.get(id_digest(request.custom_id), 0) + 1
        self.counts.num_in_flight += 1
        try:
            for attempt in range(first, first + MAX_ATTEMPTS):
                name = request_id(self._batch, request, attempt)
                try:
                    completion = await self._ask_patiently(request, name)
                except RequestError as error:
                    is_last = attempt == first + MAX_ATTEMPTS - 1
                    if is_last or not _may_end_better(error):
                        self._refused(request, name, error)
                        return
                else:
                    self._answered(request, completion)
                    return
        finally:
            self.counts.num_in_flight -= 1

    async def _ask_patiently(self, request: BatchRequest, name: str) -> Completion:
        """Ask under one id until the queue has room; the client waits out Redis's outages."""
        while True:
            try:
                return await self._ask(request, name)
            except Overloaded as error:
                await asyncio.sleep(error.retry_after_s)

    def _answered(self, request: BatchRequest, completion: Completion) -> None:
        self._write(
            answer_line(
                self._line_id(request.line_number),
                request,
                completion,
                model=request.body.model or self._model,
                created_s=int(time.time()),
            )
        )
        self.counts.num_answered += 1
        for choice in completion.choices or (completion,):
            self.counts.num_output_tokens += choice.usage.completion_tokens
        self.counts.num_prompt_tokens += completion.usage.prompt_tokens

    def _refused(self, request: BatchRequest, name: str, error: RequestError) -> None:
        # What the client itself refused never reached the queue, so a mended line is asked again.
        is_local = isinstance(error, InvalidRequest) and error.worker_id is None
        self._fail(
            request.line_number,
            request.custom_id,
            error.code.value,
            f"line {request.line_number}: {error.message}",
            None if is_local else name,
        )

    def _fail(
        self,
        line_number: int,
        custom_id: str | None,
        code: str,
        message: str,
        name: str | None = None,
    ) -> None:
        self._write(error_line(self._line_id(line_number), custom_id, code, message, name))
        self.counts.num_failed += 1

    def _line_id(self, line_number: int) -> str:
        return f"batch_req_{self._batch.removeprefix('batch-')}_{line_number}"


async def _wait_for_any(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until some task is done, let its error be seen, and return the others."""
    done, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return left


def _may_end_better(error: RequestError) -> bool:
    """Whether the next try, under an id of its own, may have an answer.

    An answer that outlived its time in Redis before anybody read it can be made again.
    """
    return error.retryable or error.code is ErrorCode.RESULT_EXPIRED

"""FakeWorker: scripted answers on a real queue, for the tests of a backend.

It speaks the queue's functions as a real worker does, in a thread of its own, so that what is
tested is everything but the model: ids, streams, cancellation, errors, timeouts.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal

import redis

from headrace import functions
from headrace.connections import ConnectionSettings
from headrace.errors import ErrorCode, RequestError, TransportError, error_for
from headrace.fake_sequence import FakeSequence, prompt_text
from headrace.functions import EmitOutcome, Grant
from headrace.keys import Keys
from headrace.protocol import RequestMessage, decode_request
from headrace.types import FinishReason

Answer = Callable[[RequestMessage], str]
"""Returns the text to answer with, or raises a RequestError to refuse."""

LEASE_MS = 30_000
RENEW_S = 5.0
IDLE_WAIT_S = 0.02
TOTAL_TOKENS = 1_000_000


class FakeWorker:
    """Answers every request of a queue while its ``with`` block lasts; ``async with`` works too.

    ``answers`` maps the prompt's text, or the last message's, to an answer, or computes it; by
    default the prompt comes back. One token, a character or a word, is emitted a step for every
    running request, ``token_delay_s`` seconds apart. ``fail_with`` refuses everything. Leaving
    hands unfinished requests back, and the next worker goes on where this one stopped.
    """

    def __init__(
        self,
        url: str,
        *,
        queue: str = "default",
        answers: Mapping[str, str] | Answer | None = None,
        token_delay_s: float = 0.0,
        fail_with: ErrorCode | None = None,
        split: Literal["characters", "words"] = "characters",
        max_num_seqs: int = 256,
    ) -> None:
        self.worker_id = f"fake-{uuid.uuid4().hex[:8]}"
        self.requests: list[RequestMessage] = []  # as they were claimed; read it, do not change it
        self._keys = Keys(queue)
        self._redis = ConnectionSettings(url, max_connections=2).commands_sync()
        self._answers = answers
        self._token_delay_s = token_delay_s
        self._fail_with = fail_with
        self._split = split
        self._max_num_seqs = max_num_seqs
        # Below: touched by the worker's thread alone, but for the event.
        self._running: list[FakeSequence] = []
        self._nonce = uuid.uuid4().hex
        self._wake_cursor = "0-0"
        self._renewed_s = 0.0
        self._is_leaving = threading.Event()
        self._crash: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=self.worker_id, daemon=True)

    def __enter__(self) -> FakeWorker:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_leaving.set()
        self._thread.join()
        self._redis.close()
        if self._crash is not None:
            raise self._crash

    async def __aenter__(self) -> FakeWorker:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The thread ends within milliseconds; leaving the loop for it would let others run first.
        self.__exit__(kind, error, trace)

    def _run(self) -> None:
        try:
            while not self._is_leaving.is_set():
                self._step()
            self._hand_back()
        except Exception as error:  # reported by __exit__, where the test sees it
            self._crash = error

    def _step(self) -> None:
        """Live through one step of a worker: claim, emit, finish; wait out an absent Redis."""
        try:
            self._renew()
            self._claim()
            self._emit()
            if self._running:
                self._is_leaving.wait(self._token_delay_s)
            else:
                self._wait_for_work()
        except TransportError as error:
            if not error.retryable_later:
                raise
            self._is_leaving.wait(IDLE_WAIT_S)

    def _claim(self) -> None:
        free_seqs = self._max_num_seqs - len(self._running)
        if not free_seqs:
            return
        call = functions.claim(
            self._keys,
            worker_id=self.worker_id,
            nonce=self._nonce,  # kept until a reply came, so that a lost one can be had again
            free_seqs=free_seqs,
            free_tokens=TOTAL_TOKENS if not self._running else TOTAL_TOKENS // 2,
            total_tokens=TOTAL_TOKENS,
            lease_ms=LEASE_MS,
        )
        reply = functions.run_sync(self._redis, call)
        self._nonce = uuid.uuid4().hex
        self._wake_cursor = reply.wake_cursor
        for grant in reply.grants:
            self._admit(grant)

    def _admit(self, grant: Grant) -> None:
        sequence = FakeSequence(grant, self.worker_id)
        self._running.append(sequence)
        try:
            request = decode_request(grant.payload)
            self.requests.append(request)
            sequence.answer(request, self._answer_to(request), self._split)
        except RequestError as error:
            sequence.refuse(error)

    def _answer_to(self, request: RequestMessage) -> str:
        if self._fail_with is not None:
            raise error_for(self._fail_with, f"FakeWorker fails with {self._fail_with.value}")
        prompt = prompt_text(request)
        if self._answers is None:
            return prompt
        if callable(self._answers):
            return self._answers(request)
        if prompt not in self._answers:
            raise error_for(ErrorCode.INVALID_REQUEST, f"FakeWorker has no answer to {prompt!r}")
        return self._answers[prompt]

    def _emit(self) -> None:
        for sequence in self._running:
            if sequence.is_overdue and not sequence.is_done:
                sequence.stop_early(FinishReason.DEADLINE)
        speaking = [sequence for sequence in self._running if not sequence.is_done]
        items = [sequence.next_item() for sequence in speaking]
        if items:
            call = functions.emit(self._keys, worker_id=self.worker_id, items=items)
            replies = functions.run_sync(self._redis, call)
            for sequence, reply in zip(speaking, replies, strict=True):
                self._heed(sequence, reply.outcome, reply.offset)
        for sequence in [sequence for sequence in self._running if sequence.is_done]:
            functions.run_sync(self._redis, sequence.finish_call(self._keys))
            self._running.remove(sequence)

    def _heed(self, sequence: FakeSequence, outcome: EmitOutcome, offset: int) -> None:
        if outcome in (EmitOutcome.FENCED, EmitOutcome.DONE, EmitOutcome.GONE):
            self._running.remove(sequence)
            return
        sequence.num_emitted = offset
        if outcome is EmitOutcome.CANCEL:
            sequence.cancel()
        elif outcome is EmitOutcome.FINISH:
            sequence.stop_early(FinishReason.STOPPED_EARLY)

    def _renew(self) -> None:
        if time.monotonic() - self._renewed_s < RENEW_S:
            return
        self._renewed_s = time.monotonic()
        reap = functions.reap(self._keys, worker_id=self.worker_id, lease_ms=LEASE_MS, count=100)
        functions.run_sync(self._redis, reap)
        self._call_for_held(functions.renew, lease_ms=LEASE_MS)

    def _hand_back(self) -> None:
        try:
            self._call_for_held(functions.release)
        except TransportError as error:
            if not error.retryable_later:  # an absent Redis: the leases will run out
                raise

    def _call_for_held(self, build: Callable[..., functions.Call[Any]], **options: Any) -> None:
        held = [sequence.grant.held for sequence in self._running]
        if held:
            call = build(self._keys, worker_id=self.worker_id, held=held, **options)
            functions.run_sync(self._redis, call)

    def _wait_for_work(self) -> None:
        execute: Any = self._redis.execute_command
        block_ms = round(IDLE_WAIT_S * 1000)
        try:
            execute("XREAD", "BLOCK", block_ms, "STREAMS", self._keys.wake, self._wake_cursor)
        except (redis.RedisError, OSError):
            self._is_leaving.wait(IDLE_WAIT_S)  # the next claim says what is wrong

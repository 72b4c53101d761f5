"""Grammars are compiled beside the engine's loop, never in it.

Each compile has a thread of its own and a bound on its time. All else here is touched by the
engine's thread alone; the threads hand back their results under a lock, and wake whoever sleeps
on ``fileno``. One compile serves all who wait for it, and the last ones are kept.

States of one compile share the library's room for their tables, and when it is used up, all of them
fail. So a grammar that failed is forgotten, and compiled again for whoever still needs it.

One thing does hold up the loop, once: the library reads the tokenizer with Python's lock held, half
a second for 49,152 tokens.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_worker.engine.grammar import GrammarState, GrammarTokens, explain

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_AT_ONCE = 2  # compiles; more would take processors from the steps
_MOST_KEPT = 64  # compiled grammars


@dataclass(frozen=True, slots=True)
class GrammarRefusal:
    """Why a sequence cannot have its grammar."""

    code: str  # a value of headrace.errors.ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class _Job:
    """What is compiled once for all sequences that wait for the same."""

    grammar: str
    output_token_ids: tuple[int, ...]  # emitted in earlier epochs, to be taken at once


class GrammarCompiler:
    """Turns grammars into states; ``load_tokens`` is called when the first one comes."""

    def __init__(
        self, load_tokens: Callable[[], GrammarTokens], *, compile_timeout_s: float
    ) -> None:
        self._load_tokens = load_tokens
        self._compile_timeout_s = compile_timeout_s
        self._tokens: GrammarTokens | None = None  # set once, under the lock
        self._tokens_lock = threading.Lock()
        self._waiting: dict[_Job, set[int]] = {}  # seq_ids; a job that runs may have none left
        self._queued: deque[_Job] = deque()  # not started yet
        self._num_started = 0  # and not taken back yet
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()  # at their start, by grammar
        self._done: list[tuple[_Job, LLMatcher | GrammarRefusal]] = []  # under the lock
        self._done_lock = threading.Lock()  # so there is a byte to read exactly when there is one
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            weakref.finalize(self, os.close, fd)

    def fileno(self) -> int:
        """Return what becomes readable when ``take`` has something to return."""
        return self._wake_read

    @property
    def is_waited_for(self) -> bool:
        """Whether any sequence still waits for its grammar."""
        return any(self._waiting.values())

    def submit(self, seq_id: int, grammar: str, output_token_ids: tuple[int, ...]) -> None:
        """Compile for one sequence, and go on in the grammar by what it has emitted already."""
        job = _Job(grammar, output_token_ids)
        if job not in self._waiting:
            self._waiting[job] = set()
            self._queue(job)
        self._waiting[job].add(seq_id)
        self._start_queued()

    def cancel(self, seq_id: int) -> None:
        """Forget a sequence; what is being compiled for it is finished and kept."""
        for seq_ids in self._waiting.values():
            seq_ids.discard(seq_id)

    def forget(self, grammar: str) -> None:
        """Keep a compiled grammar no longer, because a state that shared its tables failed."""
        self._kept.pop(grammar, None)

    def take(self) -> list[tuple[int, GrammarState | GrammarRefusal]]:
        """Return, by sequence, what has come of their grammars since the last call."""
        taken: list[tuple[int, GrammarState | GrammarRefusal]] = []
        for job, result in self._take_done() if self._waiting else ():
            self._num_started -= 1
            for seq_id in sorted(self._waiting.pop(job)):
                taken.append((seq_id, self._make_state(result)))
            if not isinstance(result, GrammarRefusal) and not job.output_token_ids:
                self._keep(job.grammar, result)
        self._start_queued()
        return taken

    def _take_done(self) -> list[tuple[_Job, LLMatcher | GrammarRefusal]]:
        with self._done_lock:
            done, self._done = self._done, []
            if done:
                os.read(self._wake_read, 1)
        return done

    def _make_state(self, result: LLMatcher | GrammarRefusal) -> GrammarState | GrammarRefusal:
        if isinstance(result, GrammarRefusal):
            return result
        assert self._tokens is not None, "it was compiled with them"
        return GrammarState(self._tokens, result.deep_copy())

    def _keep(self, grammar: str, matcher: LLMatcher) -> None:
        self._kept[grammar] = matcher
        self._kept.move_to_end(grammar)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)

    def _queue(self, job: _Job) -> None:
        kept = self._kept.get(job.grammar)
        if kept is None or job.output_token_ids:
            self._queued.append(job)
        else:  # it need not wait for what others compile
            self._num_started += 1
            self._hand_back(job, kept)

    def _start_queued(self) -> None:
        while self._queued and self._num_started < _MOST_AT_ONCE:
            job = self._queued.popleft()
            if not self._waiting[job]:
                del self._waiting[job]
                continue
            self._num_started += 1
            threading.Thread(
                target=lambda job=job: self._hand_back(job, self._run(job)),
                name="grammar",
                daemon=True,  # a compile that never ends must not keep the process
            ).start()

    def _hand_back(self, job: _Job, result: LLMatcher | GrammarRefusal) -> None:
        """Called on any thread."""
        with self._done_lock:
            if not self._done:
                os.write(self._wake_write, b"\0")
            self._done.append((job, result))

    def _run(self, job: _Job) -> LLMatcher | GrammarRefusal:
        """Compile on another thread, for as long as that may take."""
        try:
            tokens = self._load_tokens_once()
        except Exception as error:  # whatever the library has against this model's tokenizer
            message = f"this model's tokenizer cannot be used with grammars: {error}"
            return GrammarRefusal("invalid_request", message)
        results: list[LLMatcher | GrammarRefusal] = []
        thread = threading.Thread(
            target=lambda: results.append(_compile(tokens, job)),
            name="grammar-compile",
            daemon=True,
        )
        thread.start()
        thread.join(self._compile_timeout_s)
        if results:
            return results[0]
        took = f"took more than {self._compile_timeout_s:g} s" if thread.is_alive() else "failed"
        return GrammarRefusal("invalid_request", f"compiling the grammar {took}")

    def _load_tokens_once(self) -> GrammarTokens:
        with self._tokens_lock:
            if self._tokens is None:
                self._tokens = self._load_tokens()
            return self._tokens


def _compile(tokens: GrammarTokens, job: _Job) -> LLMatcher | GrammarRefusal:
    try:
        matcher = tokens.compile(job.grammar)
    except Exception as error:  # it comes from outside: what is wrong with it is that request's
        return GrammarRefusal("invalid_request", f"the grammar is invalid: {error}")
    if job.output_token_ids and not matcher.consume_tokens(list(job.output_token_ids)):
        # The same grammar and tokens chose them, so it cannot happen.
        message = f"the tokens emitted so far do not follow the grammar: {explain(matcher)}"
        return GrammarRefusal("engine_failure", message)
    return matcher

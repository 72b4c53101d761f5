"""Token logs put together, without I/O: ordered, de-duplicated, every gap found.

Half-open intervals of token offsets, for an entry with the id ``<end>-0`` and three tokens::

    have                        [0 ............ num_tokens)
    duplicate      [start..end)
    overlap                            [start ..|.. end)         cut at num_tokens
    next                                        [start .. end)
    gap                                              [start .. end)   ProtocolError
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import ProtocolError, StreamUnfinished, error_for
from headrace.protocol import (
    CHUNK_FIELD,
    TERMINAL_FIELD,
    ChunkMessage,
    TerminalMessage,
    decode_chunk,
    decode_terminal,
)
from headrace.types import Chunk, Completion, TokenLogprob, Usage


class LogAssembly:
    """One request's token log as far as it was read."""

    def __init__(
        self,
        request_id: str,
        log_key: str,
        *,
        after: int = 0,
        choice: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.request_id = request_id
        self.log_key = log_key
        self.start = after  # offset of the first token that the reader wants
        self.num_tokens = after  # offset of the next token
        self.choice = choice
        self.terminal: TerminalMessage | None = None
        self._metadata = dict(metadata or {})
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None

    @property
    def cursor(self) -> str:
        """Entry id to read on from; what ends the log, ``<n>-1``, still comes after it."""
        return f"{self.num_tokens}-0"

    @property
    def is_finished(self) -> bool:
        """Whether the terminal entry was read."""
        return self.terminal is not None

    def feed(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Chunk | None:
        """Take one entry; return what it adds, None for what is already here.

        Raises ProtocolError for an entry that leaves a gap or cannot be read.
        """
        if self.is_finished:
            return None
        offset = _offset(entry_id)
        if (data := fields.get(CHUNK_FIELD)) is not None:
            return self._add_chunk(offset, decode_chunk(data))
        if (data := fields.get(TERMINAL_FIELD)) is not None:
            return self._add_terminal(offset, decode_terminal(data))
        raise ProtocolError(f"entry {entry_id!r} of {self.log_key} has fields {list(fields)}")

    def completion(self) -> Completion:
        """Return the result; raises the request's own error where the answer was "no"."""
        if (terminal := self.terminal) is None:
            raise StreamUnfinished(f"request {self.request_id!r} has no terminal entry yet")
        if terminal.error_code is not None:
            raise error_for(
                terminal.error_code,
                terminal.error_message or terminal.error_code.value,
                request_id=self.request_id,
                worker_id=terminal.worker_id,
            )
        return Completion(
            request_id=self.request_id,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=terminal.finish_reason,
            usage=terminal.usage or Usage(0, self.num_tokens),
            timings=terminal.timings,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            metadata=self._metadata,
            prompt_logprobs=terminal.prompt_logprobs,
        )

    def _add_chunk(self, end: int, message: ChunkMessage) -> Chunk | None:
        start = end - len(message.token_ids)
        self._refuse_gap(start)
        if end <= self.num_tokens:
            return None
        new = slice(self.num_tokens - start, None)
        chunk = Chunk(
            index=self.num_tokens,
            token_ids=message.token_ids[new],
            text="".join(message.pieces[new]),
            choice=self.choice,
            logprobs=None if message.logprobs is None else message.logprobs[new],
        )
        self._keep(chunk)
        self.num_tokens = end
        return chunk

    def _add_terminal(self, end: int, message: TerminalMessage) -> Chunk | None:
        self._refuse_gap(end)
        self.terminal = message
        if not message.text:
            return None
        chunk = Chunk(index=self.num_tokens, token_ids=(), text=message.text, choice=self.choice)
        self._keep(chunk)
        return chunk

    def _refuse_gap(self, start: int) -> None:
        if start > self.num_tokens:
            raise ProtocolError(
                f"token log {self.log_key} skips from offset {self.num_tokens} to {start}"
            )

    def _keep(self, chunk: Chunk) -> None:
        self._token_ids.extend(chunk.token_ids)
        self._texts.append(chunk.text)
        if chunk.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs.extend(chunk.logprobs)


class StreamAssembly:
    """The logs of one stream, one per answer, merged in the order of arrival."""

    def __init__(self, request_id: str, logs: Sequence[LogAssembly]) -> None:
        self.request_id = request_id
        self.logs = tuple(logs)
        self.is_finished = self._can_end()  # no more chunks can come; asked at every one
        self._ready: deque[Chunk] = deque()  # read, not yet taken

    @property
    def num_ready(self) -> int:
        """Chunks that wait to be taken."""
        return len(self._ready)

    @property
    def unfinished(self) -> list[LogAssembly]:
        """Logs whose terminal entry was not read yet."""
        return [log for log in self.logs if not log.is_finished]

    def feed(
        self, log: LogAssembly, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]
    ) -> None:
        """Take entries of one of the logs; raises ProtocolError as LogAssembly.feed does."""
        for entry_id, fields in entries:
            if (chunk := log.feed(entry_id, fields)) is not None:
                self._ready.append(chunk)
        if log.is_finished:
            self.is_finished = self._can_end()

    def take(self) -> Chunk | None:
        """Return the next chunk, or None where nothing is ready."""
        return self._ready.popleft() if self._ready else None

    def completion(self) -> Completion:
        """Return the result of all answers; raises the first error among them."""
        for log in self.logs:
            if log.terminal is not None and log.terminal.error_code is not None:
                log.completion()
        choices = tuple(log.completion() for log in self.logs)
        if len(choices) == 1:
            return choices[0]
        usage = Usage(
            prompt_tokens=choices[0].usage.prompt_tokens,
            completion_tokens=sum(choice.usage.completion_tokens for choice in choices),
            cached_tokens=choices[0].usage.cached_tokens,
        )
        return replace(choices[0], request_id=self.request_id, usage=usage, choices=choices)

    def _can_end(self) -> bool:
        """Say whether all logs ended, or one ended with an error."""
        return all(log.is_finished for log in self.logs) or any(
            log.terminal and log.terminal.error_code for log in self.logs
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """What a stream reads, once Redis knows of its request."""

    assembly: StreamAssembly
    is_doubtful: bool = False  # the request had ended before: its log may be gone


def _offset(entry_id: bytes) -> int:
    offset, _, _ = entry_id.partition(b"-")
    return int(offset)

"""One scripted answer of a FakeWorker, from its grant to its terminal entry."""

from __future__ import annotations

import re
import time
import zlib
from dataclasses import replace

from headrace import functions
from headrace.errors import ErrorCode, RequestError
from headrace.functions import Call, EmitItem, FinishReply, Grant
from headrace.keys import Keys
from headrace.protocol import (
    ChunkMessage,
    RequestMessage,
    TerminalMessage,
    encode_chunk,
    encode_terminal,
)
from headrace.types import FinishReason, RequestState, Timings, TokenLogprob, Usage


class FakeSequence:
    """A request that a FakeWorker holds; goes on where an earlier grant stopped."""

    def __init__(self, grant: Grant, worker_id: str) -> None:
        self.grant = grant
        self.num_emitted = grant.num_tokens
        self._worker_id = worker_id
        self._started_s = time.monotonic()
        self._tokens: list[str] = []
        self._wants_logprobs = False
        self._echoed = ""  # said before the first token
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._usage = Usage(0, 0)
        self._reason = FinishReason.STOP
        self._error_code: ErrorCode | None = None
        self._error_message = ""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to emit."""
        return self._error_code is not None or self.num_emitted >= len(self._tokens)

    def answer(self, request: RequestMessage, text: str, split: str) -> None:
        """Set what is to be said, cut at the request's max_tokens; stop strings end nothing."""
        tokens, asked = split_text(text, split), prompt_text(request)
        limit = request.sampling.max_tokens
        if limit is not None and len(tokens) > limit:
            tokens, self._reason = tokens[:limit], FinishReason.LENGTH
        self._tokens = tokens
        self._wants_logprobs = request.sampling.logprobs is not None
        prompt = split_text(asked, split)
        self._usage = Usage(len(prompt), len(tokens))
        self._echoed = asked if request.sampling.echo else ""
        if request.sampling.prompt_logprobs is not None:
            self._prompt_logprobs = (None, *(_certain(token) for token in prompt[1:]))

    def refuse(self, error: RequestError) -> None:
        """End with an error."""
        self._reason = FinishReason.ERROR
        self._error_code, self._error_message = error.code, error.message

    def cancel(self) -> None:
        """End as a client wishes."""
        self._reason = FinishReason.CANCELLED
        self._error_code, self._error_message = ErrorCode.CANCELLED, "cancelled by a client"

    def stop_early(self, reason: FinishReason) -> None:
        """End with what was said so far."""
        self._tokens, self._reason = self._tokens[: self.num_emitted], reason
        self._usage = replace(self._usage, completion_tokens=self.num_emitted)

    @property
    def is_overdue(self) -> bool:
        """Whether its deadline has passed."""
        if self.grant.deadline_ms is None:
            return False
        return time.monotonic() - self._started_s >= (
            (self.grant.deadline_ms - self.grant.now_ms) / 1000
        )

    def next_item(self) -> EmitItem:
        """Return the next token as a chunk."""
        token = self._tokens[self.num_emitted]
        logprobs = (_certain(token),) if self._wants_logprobs else None
        text = token if self.num_emitted else self._echoed + token
        return EmitItem(
            self.grant.tenant,
            self.grant.request_id,
            self.grant.epoch,
            offset=self.num_emitted,
            num_tokens=1,
            entry=encode_chunk(ChunkMessage((token_id(token),), (text,), logprobs)),
        )

    def finish_call(self, keys: Keys) -> Call[FinishReply]:
        """Return the call that ends the request."""
        code = None if self._error_code is None else self._error_code.value
        return functions.finish(
            keys,
            worker_id=self._worker_id,
            tenant=self.grant.tenant,
            request_id=self.grant.request_id,
            epoch=self.grant.epoch,
            num_tokens=self.num_emitted,
            state=_STATES.get(self._reason, RequestState.FINISHED),
            terminal=encode_terminal(self._terminal()),
            finish_reason=self._reason.value,
            error_code=code,
            error_message=self._error_message,
        )

    def _terminal(self) -> TerminalMessage:
        ran_s = time.monotonic() - self._started_s
        queue_s = max(0, self.grant.now_ms - self.grant.enqueued_ms) / 1000
        return TerminalMessage(
            finish_reason=self._reason,
            text="" if self.num_emitted or self._error_code else self._echoed,
            usage=self._usage,
            timings=Timings(queue_s, queue_s, None, queue_s + ran_s),
            error_code=self._error_code,
            error_message=self._error_message,
            worker_id=self._worker_id,
            prompt_logprobs=None if self._error_code else self._prompt_logprobs,
        )


_STATES = {
    FinishReason.ERROR: RequestState.FAILED,
    FinishReason.CANCELLED: RequestState.CANCELLED,
}


def _certain(token: str) -> TokenLogprob:
    return TokenLogprob(token_id(token), 0.0)


def prompt_text(request: RequestMessage) -> str:
    """Return what was asked: the prompt, token ids as characters, or the last message's text."""
    if isinstance(request.prompt, str):
        return request.prompt
    if request.prompt is not None:
        return "".join(map(chr, request.prompt))
    last = (request.messages or ({},))[-1]
    content = last.get("content", "")
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def split_text(text: str, split: str) -> list[str]:
    """Cut a text into tokens: characters, or words with the space before them."""
    return list(text) if split == "characters" else re.findall(r"\s*\S+|\s+$", text)


def token_id(token: str) -> int:
    """Return the id of a token: a character's code point, a word's checksum."""
    return ord(token) if len(token) == 1 else zlib.crc32(token.encode()) & 0x7FFFFFFF

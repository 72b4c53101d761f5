"""An untrusted payload becomes a sequence for the engine, or a "no" that names the value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from headrace.checks import shown
from headrace.errors import ErrorCode, InvalidRequest, UnknownModel
from headrace.protocol import ChunkMessage, RequestMessage, decode_request
from headrace.scores import check_num_scores
from headrace.types import FinishReason
from headrace_worker.engine.messages import EngineReady, SamplingSpec
from headrace_worker.serving.chat import Chat
from headrace_worker.serving.detokenizer import Detokenizer
from headrace_worker.serving.resolve import check_vocabulary, resolve_sampling
from headrace_worker.serving.tokenizer import Tokenizer

MAX_ECHO_BYTES = 1024 * 1024  # half of what an entry of the token log may have


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request as the engine can run it."""

    message: RequestMessage
    prompt_token_ids: tuple[int, ...]  # at least one, shorter than the context
    output_token_ids: tuple[int, ...]  # emitted in earlier epochs
    sampling: SamplingSpec
    salt: bytes  # prefix-cache domain of the tenant
    detokenizer: Detokenizer  # has taken the output tokens above
    finish_reason: FinishReason | None = None  # set when the emitted tokens already end the request

    @property
    def needs_scores(self) -> bool:
        """Whether the engine has to compute the prompt for its logprobs."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_token_ids) > 1


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: tuple[int, ...]
    text: str | None  # as given, or as its template made it; None where only ids were given


class Intake:
    """Prepares requests for one engine; it keeps no state, so any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, ready: EngineReady, served_model_name: str) -> None:
        self._tokenizer = tokenizer
        self._ready = ready
        self._served_model_name = served_model_name

    def prepare(
        self,
        payload: bytes,
        *,
        tenant: str,
        request_id: str,
        emitted: Sequence[ChunkMessage] = (),
    ) -> PreparedRequest:
        """Decode, check and tokenize one request.

        Tokenizing runs at a few MB/s and blocks: callers with an event loop run this in a thread
        when the payload is large.

        Raises:
            RequestError: the answer is "no"; its code and message go on the wire as they are.
        """
        message = decode_request(payload)
        self._check_identity(message, tenant, request_id)
        self._check_model(message)
        prompt = self._read_prompt(message)
        self._check_length(len(prompt.token_ids))
        check_num_scores(len(prompt.token_ids), message.sampling.prompt_logprobs)
        sampling = resolve_sampling(message, len(prompt.token_ids), self._tokenizer, self._ready)
        output = tuple(token_id for chunk in emitted for token_id in chunk.token_ids)
        detokenizer = self._make_detokenizer(message, prompt, sampling)
        for token_id in output:
            detokenizer.append(token_id)
        return PreparedRequest(
            message=message,
            prompt_token_ids=prompt.token_ids,
            output_token_ids=output,
            sampling=sampling,
            salt=tenant_salt(tenant),
            detokenizer=detokenizer,
            finish_reason=_finish_reason(output, sampling, detokenizer),
        )

    def _check_identity(self, message: RequestMessage, tenant: str, request_id: str) -> None:
        """The queue's keys name the request; a payload that names another would answer for it."""
        if (message.tenant, message.request_id) != (tenant, request_id):
            raise InvalidRequest(
                f"the payload is request {message.request_id!r} of tenant {message.tenant!r},"
                f" queued as {request_id!r} of {tenant!r}"
            )

    def _check_model(self, message: RequestMessage) -> None:
        if message.model not in (None, self._served_model_name):
            raise UnknownModel(
                f"model {shown(message.model)} is not served here; this queue's worker serves"
                f" {self._served_model_name!r}"
            )

    def _read_prompt(self, message: RequestMessage) -> _Prompt:
        prompt = self._tokenize(message)
        if not prompt.token_ids:
            raise InvalidRequest("the prompt has no tokens")
        check_vocabulary("the prompt", prompt.token_ids, self._ready)
        return prompt

    def _tokenize(self, message: RequestMessage) -> _Prompt:
        if message.messages is not None:
            chat = Chat(message.messages, message.tools, message.chat_template_kwargs)
            text = self._tokenizer.render_chat(chat)
            return _Prompt(self._tokenizer.encode_plain(text), text)
        if isinstance(message.prompt, str):
            return _Prompt(self._tokenizer.encode(message.prompt), message.prompt)
        return _Prompt(message.prompt or (), None)

    def _make_detokenizer(
        self, message: RequestMessage, prompt: _Prompt, sampling: SamplingSpec
    ) -> Detokenizer:
        params = message.sampling
        return Detokenizer(
            self._tokenizer.token_bytes,
            params.stop,
            params.min_tokens,
            include_stop=params.include_stop,
            echo=self._echo(prompt) if params.echo else "",
            silent_ids=frozenset() if params.include_stop else self._ends(sampling),
        )

    def _ends(self, sampling: SamplingSpec) -> frozenset[int]:
        """Return the tokens of which each ends the output; a grammar's end cannot be ignored."""
        stops = frozenset(sampling.stop_token_ids)
        return stops if sampling.grammar is None else stops | self._tokenizer.eos_token_ids

    def _echo(self, prompt: _Prompt) -> str:
        """Return the prompt's text; it has to travel with the first token."""
        text = self._tokenizer.show(prompt.token_ids) if prompt.text is None else prompt.text
        num_bytes = len(text.encode())
        if num_bytes > MAX_ECHO_BYTES:
            raise InvalidRequest(
                f"echo of a prompt of {num_bytes} bytes, at most {MAX_ECHO_BYTES} are taken"
            )
        return text

    def _check_length(self, num_prompt_tokens: int) -> None:
        """Refuse what can never run: output needs room for one token at least."""
        context, capacity = self._ready.max_model_len, self._ready.max_kv_tokens
        if num_prompt_tokens >= context:
            raise InvalidRequest(
                f"the prompt has {num_prompt_tokens} tokens, and a context of {context} has to hold"
                " prompt and output",
                code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            )
        if num_prompt_tokens >= capacity:
            raise InvalidRequest(
                f"the prompt has {num_prompt_tokens} tokens, and the KV cache of {capacity} has to"
                " hold prompt and output",
                code=ErrorCode.KV_CAPACITY_EXCEEDED,
            )


def tenant_salt(tenant: str) -> bytes:
    """Return the tenant's prefix-cache domain; the tag keeps it apart from any other salt."""
    return blake2b(b"headrace/tenant\0" + tenant.encode(), digest_size=16).digest()


def _finish_reason(
    output: tuple[int, ...], sampling: SamplingSpec, detokenizer: Detokenizer
) -> FinishReason | None:
    """Return how the emitted tokens ended, when their worker could not say so any more."""
    if not output:
        return None
    if detokenizer.stopped or output[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    if sampling.grammar is not None:
        return None  # the last token may have completed it, which only the engine can tell
    return FinishReason.LENGTH if len(output) >= sampling.max_tokens else None

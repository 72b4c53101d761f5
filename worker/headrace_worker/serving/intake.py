"""An untrusted payload becomes a sequence for the engine, or a "no" that names the value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from headrace.errors import ErrorCode, InvalidRequest, UnknownModel
from headrace.protocol import ChunkMessage, RequestMessage, decode_request
from headrace.types import FinishReason
from headrace_worker.engine.messages import EngineReady, SamplingSpec
from headrace_worker.serving.detokenizer import Detokenizer
from headrace_worker.serving.tokenizer import Tokenizer


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
        prompt = self._tokenize(message)
        self._check_length(len(prompt))
        sampling = self._resolve(message, len(prompt))
        output = tuple(token_id for chunk in emitted for token_id in chunk.token_ids)
        detokenizer = Detokenizer(
            self._tokenizer.token_bytes, message.sampling.stop, message.sampling.min_tokens
        )
        for token_id in output:
            detokenizer.append(token_id)
        return PreparedRequest(
            message=message,
            prompt_token_ids=prompt,
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
                f"model {message.model!r} is not served here; this queue's worker serves"
                f" {self._served_model_name!r}"
            )

    def _tokenize(self, message: RequestMessage) -> tuple[int, ...]:
        if message.messages is not None:
            prompt = self._tokenizer.encode_chat(message.messages)
        elif isinstance(message.prompt, str):
            prompt = self._tokenizer.encode(message.prompt)
        else:
            prompt = message.prompt or ()
        if not prompt:
            raise InvalidRequest("the prompt has no tokens")
        self._check_vocabulary("the prompt", prompt)
        return prompt

    def _check_vocabulary(self, where: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._ready.vocab_size:
                raise InvalidRequest(
                    f"{where} holds token id {token_id}, outside the vocabulary of"
                    f" {self._ready.vocab_size}"
                )

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

    def _resolve(self, message: RequestMessage, num_prompt_tokens: int) -> SamplingSpec:
        """Resolve every default; the engine gets numbers only."""
        params = message.sampling
        bias = params.logit_bias or {}
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("logit_bias", bias)
        greedy = params.top_p == 0  # an empty nucleus has one candidate, the most likely
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= {i for i in self._tokenizer.eos_token_ids if i < self._ready.vocab_size}
        room = min(self._ready.max_model_len, self._ready.max_kv_tokens) - num_prompt_tokens
        return SamplingSpec(
            max_tokens=min(room, params.max_tokens or room),
            seed=_seed(message) if params.seed is None else params.seed,
            temperature=0.0 if greedy else float(params.temperature),
            top_k=params.top_k,
            top_p=1.0 if greedy else float(params.top_p),
            min_p=float(params.min_p),
            repetition_penalty=float(params.repetition_penalty),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            logit_bias=tuple((token_id, float(value)) for token_id, value in bias.items()),
            min_tokens=params.min_tokens,
            stop_token_ids=tuple(sorted(stops)),
            logprobs=params.logprobs,
        )


def tenant_salt(tenant: str) -> bytes:
    """Return the tenant's prefix-cache domain; the tag keeps it apart from any other salt."""
    return blake2b(b"headrace/tenant\0" + tenant.encode(), digest_size=16).digest()


def _seed(message: RequestMessage) -> int:
    """Clients send a seed; without one, every epoch has to draw the same, so the name decides."""
    name = f"{message.tenant}\0{message.request_id}".encode()
    digest = blake2b(b"headrace/seed\0" + name, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _finish_reason(
    output: tuple[int, ...], sampling: SamplingSpec, detokenizer: Detokenizer
) -> FinishReason | None:
    """Return how the emitted tokens ended, when their worker could not say so any more."""
    if not output:
        return None
    if detokenizer.stopped or output[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(output) >= sampling.max_tokens else None

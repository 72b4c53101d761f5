"""Sampling options, every default resolved: the engine gets ids, numbers and a checked grammar."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from headrace.errors import InvalidRequest
from headrace.protocol import RequestMessage
from headrace_worker.engine.messages import EngineReady, SamplingSpec
from headrace_worker.serving.bad_words import spell_words
from headrace_worker.serving.response_format import make_grammar
from headrace_worker.serving.tokenizer import Tokenizer


def resolve_sampling(
    message: RequestMessage, num_prompt_tokens: int, tokenizer: Tokenizer, ready: EngineReady
) -> SamplingSpec:
    """Return what the engine has to know; raises InvalidRequest that names the value at fault."""
    params = message.sampling
    bias = params.logit_bias or {}
    check_vocabulary("stop_token_ids", params.stop_token_ids, ready)
    check_vocabulary("logit_bias", bias, ready)
    greedy = params.top_p == 0  # an empty nucleus has one candidate, the most likely
    stops = set(params.stop_token_ids)
    if not params.ignore_eos:
        stops |= {i for i in tokenizer.eos_token_ids if i < ready.vocab_size}
    room = min(ready.max_model_len, ready.max_kv_tokens) - num_prompt_tokens
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
        prompt_logprobs=params.prompt_logprobs,
        bad_words=spell_words(params.bad_words, tokenizer, ready.vocab_size),
        grammar=None if params.response_format is None else make_grammar(params.response_format),
    )


def check_vocabulary(where: str, token_ids: Iterable[int], ready: EngineReady) -> None:
    """Raise InvalidRequest for an id that the model has no row for."""
    for token_id in token_ids:
        if token_id >= ready.vocab_size:
            raise InvalidRequest(
                f"{where} holds token id {token_id}, outside the vocabulary of {ready.vocab_size}"
            )


def _seed(message: RequestMessage) -> int:
    """Clients send a seed; without one, every epoch has to draw the same, so the name decides."""
    name = f"{message.tenant}\0{message.request_id}".encode()
    digest = blake2b(b"headrace/seed\0" + name, digest_size=8).digest()
    return int.from_bytes(digest, "little")

"""Intake: what a client sent becomes a sequence, or a typed "no" that names the value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ErrorCode, InvalidRequest, RequestError, UnknownModel
from headrace.protocol import RequestMessage, encode_request
from headrace.sampling import SamplingParams
from headrace.types import FinishReason
from headrace_worker.engine.messages import SamplingSpec
from headrace_worker.serving.intake import Intake, tenant_salt
from support.intake_parts import CONTEXT, INTAKE, READY, TOKENIZER, emitted_bytes, prepare, refused
from support.tokenizers import BOS_ID, EOS_ID, byte_ids, byte_level_tokenizer


def test_text_is_tokenized() -> None:
    """A prompt of text becomes the tokenizer's ids, and nothing was emitted yet."""
    prepared = prepare(prompt="Hello world")
    assert prepared.prompt_token_ids == TOKENIZER.encode("Hello world")
    assert (prepared.output_token_ids, prepared.finish_reason) == ((), None)
    assert prepared.message.request_id == "r-1"


def test_token_ids_are_taken_as_they_are() -> None:
    """A prompt of ids is not tokenized, and gets no special tokens."""
    assert prepare(prompt=(5, 6, 319)).prompt_token_ids == (5, 6, 319)


def test_messages_go_through_the_chat_template() -> None:
    """A chat becomes the template's prompt, with its one BOS."""
    prompt = prepare(messages=({"role": "user", "content": "Hi"},)).prompt_token_ids
    assert (prompt[0], prompt.count(BOS_ID)) == (BOS_ID, 1)


def test_what_a_template_refuses_is_an_invalid_request() -> None:
    """B41: the template's message is the answer."""
    error = refused(messages=({"role": "system", "content": "x"},))
    assert (type(error), error.code) == (InvalidRequest, ErrorCode.INVALID_REQUEST)
    assert "no system role here" in error.message


def test_every_option_reaches_the_engine() -> None:
    """The engine's spec has the client's numbers, and the ids that end the output."""
    options: dict[str, Any] = {
        "max_tokens": 5,
        "seed": 2**64 - 1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "min_tokens": 2,
        "logprobs": 4,
    }
    spec = prepare(**options, logit_bias={7: 1, 8: -100}, stop_token_ids=(11,)).sampling
    assert spec == SamplingSpec(
        **options, logit_bias=((7, 1.0), (8, -100.0)), stop_token_ids=(EOS_ID, 9, 11)
    )


def test_ignored_ends_of_sequence_are_no_stops() -> None:
    """B28: ignore_eos goes past every end of sequence, and keeps the client's own stops."""
    assert prepare(ignore_eos=True, stop_token_ids=(11,)).sampling.stop_token_ids == (11,)


def test_an_end_of_sequence_that_the_model_lacks_is_left_out() -> None:
    """A tokenizer's id beyond the model's head cannot be sampled, nor masked."""
    tokenizer = byte_level_tokenizer(eos_token_ids=frozenset({EOS_ID, 5000}))
    assert prepare(Intake(tokenizer, READY, "tiny")).sampling.stop_token_ids == (EOS_ID,)


def test_an_empty_nucleus_is_greedy() -> None:
    """B19: top_p 0 takes the most likely token, and never means "unfiltered"."""
    spec = prepare(top_p=0, temperature=1.0).sampling
    assert (spec.temperature, spec.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(10, 10), (59, 59), (60, 59), (10_000, 59), (None, 59)]
)
def test_output_is_limited_by_the_context(max_tokens: int | None, expected: int) -> None:
    """Prompt and output share the context; None takes all that is left of it."""
    assert prepare(prompt=(5,) * 5, max_tokens=max_tokens).sampling.max_tokens == expected


def test_output_is_limited_by_the_kv_cache() -> None:
    """A cache smaller than the context is the limit."""
    intake = Intake(TOKENIZER, replace(READY, num_blocks=2), "tiny")
    assert prepare(intake, prompt=(5,) * 30, max_tokens=None).sampling.max_tokens == 2


@pytest.mark.parametrize("num_tokens", [64, 65, 1000])
def test_a_prompt_as_long_as_the_context_is_refused(num_tokens: int) -> None:
    """B10: at 64 of 64 tokens there is no room for an answer; both numbers are in the message."""
    error = refused(prompt=(5,) * num_tokens)
    assert (type(error), error.code) == (InvalidRequest, ErrorCode.CONTEXT_LENGTH_EXCEEDED)
    assert f"{num_tokens} tokens" in error.message
    assert f"{CONTEXT} " in error.message


def test_a_prompt_one_short_of_the_context_gets_one_token() -> None:
    """B10: 63 of 64 tokens leave room for one."""
    assert prepare(prompt=(5,) * 63).sampling.max_tokens == 1


def test_a_prompt_that_can_never_fit_the_kv_cache_is_refused() -> None:
    """The message has both numbers, so that somebody can change one."""
    intake = Intake(TOKENIZER, replace(READY, num_blocks=2), "tiny")
    error = refused(intake, prompt=(5,) * 32)
    assert error.code is ErrorCode.KV_CAPACITY_EXCEEDED
    assert "32 tokens" in error.message
    assert "cache of 32" in error.message


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": (5, 320)},
        {"logit_bias": {320: 5}},
        {"logit_bias": {"999999": 5}},
        {"stop_token_ids": (320,)},
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_by_name(request_: dict[str, Any]) -> None:
    """B21: the message has the id and the size of the vocabulary."""
    error = refused(**request_)
    assert error.code is ErrorCode.INVALID_REQUEST
    assert ("320" if "999999" not in str(request_) else "999999") in error.message
    assert "vocabulary of 320" in error.message


def test_text_that_the_model_has_no_row_for_is_refused() -> None:
    """A tokenizer with more tokens than its model fails the request, not the engine."""
    intake = Intake(TOKENIZER, replace(READY, vocab_size=100), "tiny")
    assert "vocabulary of 100" in refused(intake, prompt="客").message


@pytest.mark.parametrize("model", [None, "tiny"])
def test_the_served_model_may_be_named(model: str | None) -> None:
    """A request names the served model, or none."""
    assert prepare(model=model).prompt_token_ids


def test_another_model_is_unknown() -> None:
    """The message has the wanted and the served name."""
    error = refused(model="huge")
    assert (type(error), error.code) == (UnknownModel, ErrorCode.UNKNOWN_MODEL)
    assert "'huge'" in error.message
    assert "'tiny'" in error.message
    assert len(refused(model="x" * 100_000).message) < 1000, "it travels in the terminal entry"


def test_several_answers_are_several_requests() -> None:
    """n is expanded by the client and never served as it is."""
    assert "n 3 " in refused(n=3).message


def test_a_payload_under_another_name_is_refused() -> None:
    """A payload cannot answer for a request that it was not queued as."""
    payload = encode_request(RequestMessage("r-2", "acme", SamplingParams(), prompt="x"))
    with pytest.raises(InvalidRequest, match=r"'r-2'.*'r-1'"):
        INTAKE.prepare(payload, tenant="acme", request_id="r-1", emitted=())


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"\xc1", ErrorCode.UNDECODABLE),
        (b"", ErrorCode.UNDECODABLE),
        (msgpack.packb([1]), ErrorCode.UNDECODABLE),
        (msgpack.packb({"v": 99}), ErrorCode.UNSUPPORTED_VERSION),
        (msgpack.packb({"v": 1, "id": "r-1", "t": "acme"}), ErrorCode.INVALID_REQUEST),
    ],
)
def test_an_unreadable_payload_has_a_code_of_its_own(payload: bytes, code: ErrorCode) -> None:
    """Every payload has an answer, however broken it is."""
    with pytest.raises(RequestError) as caught:
        INTAKE.prepare(payload, tenant="acme", request_id="r-1", emitted=())
    assert caught.value.code is code


@given(st.binary(max_size=200))
def test_no_payload_raises_anything_but_a_request_error(payload: bytes) -> None:
    """Bytes from the wire end in a "no", never in a crash."""
    with pytest.raises(RequestError):
        INTAKE.prepare(payload, tenant="acme", request_id="r-1", emitted=())


def test_an_unseeded_request_draws_the_same_in_every_epoch() -> None:
    """Without the client's seed its name decides, so a takeover goes on with the same draws."""
    seeds = {prepare(seed=None, request_id=name).sampling.seed for name in ("a", "a", "b")}
    assert len(seeds) == 2
    assert prepare(seed=0).sampling.seed == 0


def test_tenants_have_prefix_caches_of_their_own() -> None:
    """B33: a salt depends on the tenant alone, and carries the domain that it belongs to."""
    assert prepare(tenant="a").salt == prepare(tenant="a", request_id="r-2").salt
    assert prepare(tenant="a").salt != prepare(tenant="b").salt
    assert tenant_salt("tiny") != tenant_salt("") != b""


def test_a_takeover_begins_with_what_was_emitted() -> None:
    """The emitted tokens follow the prompt, and the text goes on inside a split character."""
    prepared = prepare(emitted=emitted_bytes(b"a" + "é".encode()[:1]))
    assert prepared.output_token_ids == tuple(byte_ids(TOKENIZER, b"a\xc3"))
    last = byte_ids(TOKENIZER, "é".encode()[1:])[0]
    assert prepared.detokenizer.append(last).text == "é"
    assert prepared.finish_reason is None


def test_max_tokens_counts_what_was_emitted() -> None:
    """The limit is that of the whole output, over all epochs."""
    assert prepare(emitted=emitted_bytes(b"abc"), max_tokens=4).sampling.max_tokens == 4


@pytest.mark.parametrize(
    ("emitted", "sampling", "reason"),
    [
        (b"abc", {"max_tokens": 3}, FinishReason.LENGTH),
        (b"abc", {"max_tokens": 4}, None),
        (b"abEND", {"stop": "END"}, FinishReason.STOP),
        (b"abEN", {"stop": "END"}, None),
        (b"abc", {"stop_token_ids": tuple(byte_ids(TOKENIZER, b"c"))}, FinishReason.STOP),
        (b"abc", {"stop_token_ids": tuple(byte_ids(TOKENIZER, b"a"))}, None),
    ],
)
def test_a_takeover_of_a_complete_output_only_ends_it(
    emitted: bytes, sampling: dict[str, Any], reason: FinishReason | None
) -> None:
    """A worker that died between the last token and the terminal entry left nothing to compute."""
    assert prepare(emitted=emitted_bytes(emitted), **sampling).finish_reason is reason

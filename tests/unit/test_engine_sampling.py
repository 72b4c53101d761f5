"""What users see of sampling options: each request gets its own, in any company."""

from __future__ import annotations

import json
from itertools import permutations
from random import Random
from typing import Any

import pytest

from headrace_worker.engine.messages import AddSequence, SampledToken
from support.oracle import Answers, OracleDecoder, make_engine, request, run, solo

WISHES: list[dict[str, Any]] = [
    {"logprobs": 5},
    {"temperature": 1.0, "top_p": 0.8, "logprobs": 0},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 3},
    {"presence_penalty": 1.5, "logit_bias": ((7, 2.0), (9, -3.0))},
    {"temperature": 1.2, "min_p": 0.05, "bad_words": ((7,), (1, 2), (9, 9)), "logprobs": 2},
    {"stop_token_ids": tuple(range(40)), "min_tokens": 9, "repetition_penalty": 0.8},
]


def long_prompt(seq_id: int, length: int) -> list[int]:
    """Tokens that differ from sequence to sequence."""
    return [(seq_id * 11 + i * i) % 61 for i in range(length)]


def wishing(seq_id: int, **more: object) -> AddSequence:
    """A request with options of its own; its prompt repeats some tokens."""
    options: dict[str, Any] = {"max_tokens": 14, **WISHES[seq_id % len(WISHES)], **more}
    return request(seq_id, [*long_prompt(seq_id, 6), 7, 9], **options)


def sampled_alone(command: AddSequence) -> list[SampledToken]:
    """Tokens and log-probabilities of the same request on a fresh, roomy engine."""
    engine = make_engine(num_blocks=256, max_num_batched_tokens=512)
    return run(engine, command).sampled[command.seq_id]


@pytest.mark.parametrize("num_seqs", [1, 4, 32])
def test_greedy_answers_do_not_depend_on_the_size_or_order_of_the_batch(num_seqs: int) -> None:
    """Thirty-two prompts, so many at once, as they came and shuffled (B14)."""
    commands = [request(i, long_prompt(i, 3 + i % 9)) for i in range(32)]
    expected = {command.seq_id: solo(command) for command in commands}
    for order in (commands, Random(num_seqs).sample(commands, 32)):
        engine = make_engine(max_num_seqs=num_seqs, max_num_batched_tokens=32, num_blocks=200)
        assert run(engine, *order).tokens == expected


@pytest.mark.parametrize("stagger", [0, 2])
def test_no_option_leaks_to_a_neighbour_in_any_order(stagger: int) -> None:
    """Tokens and log-probabilities have the bits of the solo run, whoever is beside (B16, B26)."""
    commands = {i: wishing(i) for i in range(len(WISHES))}
    expected = {i: sampled_alone(command) for i, command in commands.items()}
    for order in list(permutations(commands))[::97]:
        engine, answers = make_engine(), Answers()
        for seq_id in order:
            engine.add(commands[seq_id])
            for _ in range(stagger):
                answers.take(engine.step())
        while engine.has_work:
            answers.take(engine.step())
        assert answers.sampled == expected


def test_every_option_survives_preemption() -> None:
    """Recomputed sequences know what they had said: the same bits as alone (B26, B34)."""
    commands = [wishing(i) for i in range(12)]
    answers = run(make_engine(num_blocks=14), *commands)
    assert answers.num_preemptions >= 2
    assert answers.sampled == {c.seq_id: sampled_alone(c) for c in commands}


@pytest.mark.parametrize("seq_id", range(len(WISHES)))
def test_every_option_survives_a_takeover(seq_id: int) -> None:
    """Another worker goes on from the log as the first would have (B16, B26)."""
    whole = sampled_alone(wishing(seq_id))
    command = wishing(seq_id)
    for emitted in (1, 5, len(whole) - 1):
        token_ids = [*command.token_ids, *(token.token_id for token in whole[:emitted])]
        resumed = AddSequence(seq_id, tuple(token_ids), len(command.token_ids), command.sampling)
        assert run(make_engine(), resumed).sampled[seq_id] == whole[emitted:]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-4},
        {"temperature": 1e-30},
        {"temperature": 1.0, "top_p": 1e-4},
        {"temperature": 1.0, "top_p": 0.0},
    ],
)
def test_hardly_any_temperature_or_top_p_is_greedy(options: dict[str, float]) -> None:
    """No NaN, no crash, and never the unfiltered distribution (B18, B19)."""
    command = request(1, [1, 2, 3], max_tokens=20, **options)
    assert run(make_engine(), command).tokens[1] == solo(request(1, [1, 2, 3], max_tokens=20))


def test_more_candidates_than_tokens_are_all_tokens() -> None:
    """A top_k or a number of log-probabilities beyond the vocabulary is clamped (B23)."""
    huge = request(1, [1, 2], temperature=1.0, top_k=10**7, logprobs=10**6)
    (first, *_) = run(make_engine(), huge).sampled[1]
    assert first.token_id == solo(request(1, [1, 2], temperature=1.0))[0]
    assert len(first.top_logprobs) == 64


def test_logprobs_of_impossible_tokens_are_strict_json() -> None:
    """A logit of minus infinity becomes a number that JSON can say (B30)."""
    decoder = OracleDecoder(bias=dict.fromkeys(range(2, 64), float("-inf")))
    command = request(1, [1], temperature=1.0, top_k=1, logprobs=5, prompt_logprobs=5)
    tokens = run(make_engine(decoder=decoder), command).sampled[1]
    told = [token.top_logprobs for token in tokens]
    assert json.loads(json.dumps(told, allow_nan=False))[0][-1] == [4, -9999.0]


def test_a_bad_word_never_comes_however_likely() -> None:
    """A run is broken at its last token; its beginning alone may come."""
    decoder = OracleDecoder(bias={5: 60.0, 6: 50.0})
    free = request(1, [1], max_tokens=6)
    bound = request(2, [5], max_tokens=6, bad_words=((5, 5), (5, 6, 5)))
    answers = run(make_engine(decoder=decoder), free, bound)
    assert answers.tokens[1] == [5] * 6
    assert answers.tokens[2] == [5, 6, 6, 5, 6, 6]


def test_a_request_that_forbids_every_token_is_told_so() -> None:
    """It fails by its own fault; what it computed may serve others."""
    engine = make_engine()
    everything = tuple((token_id,) for token_id in range(64))
    answers = run(engine, request(1, long_prompt(1, 9), bad_words=everything), request(2, [5]))
    assert answers.failed[1].code == "invalid_request"
    assert answers.tokens[2] == solo(request(2, [5]))
    assert run(engine, request(3, long_prompt(1, 9))).outcomes[0].admitted == ((3, 8),)

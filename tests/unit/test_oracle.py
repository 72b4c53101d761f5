"""The oracle that other tests believe: it notices every fault in the cache, and is itself right."""

from __future__ import annotations

from random import Random

import pytest
import torch

from support.oracle import make_engine, request, run
from support.oracle_answer import whole_answer
from support.oracle_backend import OracleBackend, OracleDecoder
from support.oracle_model import ENTRY_BYTES, VOCAB_SIZE, exact_logits, hash_prefix, pack_prefix
from support.oracle_requests import WISHES

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("samples_in_lists", [False, True], ids=["sampler", "lists"])
@pytest.mark.parametrize("wish", WISHES, ids=lambda wish: "-".join(wish) or "plain")
def test_the_engine_answers_what_plain_python_works_out(
    wish: dict[str, object], samples_in_lists: bool
) -> None:
    """For every option, greedy and drawn: the same tokens from the token list alone."""
    for temperature in (0.0, 1.0):
        options = {"max_tokens": 20, "temperature": temperature, **wish}
        command = request(1, PROMPT, **options)
        answers = run(make_engine(samples_in_lists=samples_in_lists), command)
        whole = whole_answer(command, max_model_len=128)
        assert answers.tokens[1] == list(whole.tokens)
        assert answers.finished[1] is whole.reason


@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize("byte", range(ENTRY_BYTES))
def test_any_wrong_byte_in_the_cache_changes_the_next_token(place: int, byte: int) -> None:
    """A wrong id or a wrong place: the row that follows is another."""
    entries = bytearray(pack_prefix(PROMPT))
    entries[place * ENTRY_BYTES + byte] ^= 1
    assert hash_prefix(bytes(entries)) != hash_prefix(pack_prefix(PROMPT))


def test_a_fault_in_one_block_changes_the_answer_of_who_reads_it() -> None:
    """Spoiled behind the engine's back, a block is noticed by its sequence, and by nobody else."""
    engine = make_engine(max_num_batched_tokens=64)
    backend = engine.runner.backend  # type: ignore[attr-defined]
    assert isinstance(backend, OracleBackend)
    engine.add(request(1, PROMPT))
    engine.add(request(2, [7, *PROMPT]))
    engine.step()
    block = engine.scheduler.running[0].block_table[0]
    backend.cache[block * backend.block_bytes] ^= 1
    answers = run(engine)
    whole = [
        whole_answer(request(i, p), max_model_len=128) for i, p in ((1, PROMPT), (2, [7, *PROMPT]))
    ]
    assert answers.tokens[1] != list(whole[0].tokens[1:])
    assert answers.tokens[2] == list(whole[1].tokens[1:])


def test_the_rows_of_the_oracle_are_exact_and_hold_no_two_equal_logits() -> None:
    """Float32 holds them as they are, so that nothing rounds, and nothing ties."""
    dice = Random(1)
    for length in range(1, 30):
        token_ids = [dice.randrange(VOCAB_SIZE) for _ in range(length)]
        row = exact_logits(token_ids)
        hidden = torch.tensor([[hash_prefix(pack_prefix(token_ids)), 0]])
        assert OracleDecoder().logits(hidden).tolist() == [row]
        assert len(set(row)) == VOCAB_SIZE

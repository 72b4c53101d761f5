"""Known failures of other engines where blocks run short, as far as a CPU can replay them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace_worker.attention.base import PackedBatch
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.messages import SequenceFinish
from support.oracle import Answers, make_engine, request, run, solo
from support.oracle_backend import OracleBackend, OracleDecoder
from support.oracle_model import ENTRY_BYTES


def long_prompt(seq_id: int, length: int) -> list[int]:
    """Tokens that differ from sequence to sequence."""
    return [(seq_id * 11 + i * i) % 61 for i in range(length)]


def entries(engine: Engine) -> list[bytes]:
    """Return what each slot of the cache holds, those of the trash block first."""
    backend = engine.runner.backend  # type: ignore[attr-defined]
    assert isinstance(backend, OracleBackend)
    cache = bytes(backend.cache)
    return [cache[start : start + ENTRY_BYTES] for start in range(0, len(cache), ENTRY_BYTES)]


def step_and_compare(
    engine: Engine, batches: list[PackedBatch]
) -> Iterator[tuple[set[int], set[int]]]:
    """Yield, step by step, which slots changed and which were scheduled to."""
    while engine.has_work:
        before, num_batches = entries(engine), len(batches)
        engine.step()
        now = entries(engine)
        changed = {slot for slot, entry in enumerate(now) if entry != before[slot]}
        new = batches[num_batches:]
        yield changed, {slot for batch in new for slot in batch.slot_mapping.tolist()}


def test_in_a_full_pool_a_step_writes_the_slots_of_its_own_tokens_and_no_others() -> None:
    """The last slot of the last block belongs to one token, whatever pads a batch (B47)."""
    batches: list[PackedBatch] = []
    engine = make_engine(
        num_blocks=6, enable_prefix_caching=False, decoder=OracleDecoder(on_forward=batches.append)
    )
    for seq_id in (1, 2, 3):
        engine.add(request(seq_id, long_prompt(seq_id, 5), max_tokens=3))
    was_full = False
    for changed, scheduled in step_and_compare(engine, batches):
        assert changed <= scheduled
        was_full |= len(scheduled) == 3 and engine.scheduler.pool.num_free == 0
    assert was_full
    assert min(slot for batch in batches for slot in batch.slot_mapping.tolist()) >= 4
    assert set(entries(engine)[:4]) == {b"\xff" * ENTRY_BYTES}


def test_short_rows_of_the_block_table_end_in_the_trash_block() -> None:
    """What pads a row points to nobody's block, so reading or writing it harms nobody (B47)."""
    batches: list[PackedBatch] = []
    engine = make_engine(decoder=OracleDecoder(on_forward=batches.append))
    run(engine, request(1, long_prompt(1, 2)), request(2, long_prompt(2, 14)))
    mixed = [batch for batch in batches if batch.num_seqs == 2]
    assert mixed
    for batch in mixed:
        for row, length in zip(batch.block_table.tolist(), batch.seq_lens.tolist(), strict=True):
            num_blocks = -(-length // 4)
            assert 0 not in row[:num_blocks]
            assert set(row[num_blocks:]) <= {0}


def test_no_step_is_planned_before_the_tokens_of_the_last_are_known() -> None:
    """With preemptions all along, each decode computes the token told last (B48)."""
    told: dict[int, int] = {}
    decoder = OracleDecoder()
    engine = make_engine(num_blocks=11, decoder=decoder)

    def check(batch: PackedBatch) -> None:
        decoding = [s for s in engine.scheduler.running if s.num_uncomputed_tokens == 1]
        expected = [told[seq.seq_id] for seq in decoding]
        assert batch.input_ids[: batch.num_decodes].tolist() == expected

    decoder.on_forward = check
    answers = Answers()
    commands = [request(i, long_prompt(i, 6), max_tokens=14) for i in range(1, 7)]
    for command in commands:
        engine.add(command)
    while engine.has_work:
        answers.take(engine.step())
        told = {seq_id: tokens[-1] for seq_id, tokens in answers.tokens.items()}
    assert answers.num_preemptions >= 1
    assert answers.tokens == {command.seq_id: solo(command) for command in commands}


def test_a_context_that_was_fitted_to_the_pool_is_the_one_that_counts() -> None:
    """Configured for 1000 tokens, with room for 64: 63 run, more fail, the next is served (B10)."""
    engine = make_engine(num_blocks=16, max_model_len=1000)
    commands = [request(i, [1] * length) for i, length in enumerate((63, 64, 65, 1000), start=1)]
    answers = run(engine, *commands, request(9, [1, 2]))
    assert {seq_id: failure.code for seq_id, failure in answers.failed.items()} == {
        2: "kv_capacity_exceeded",
        3: "kv_capacity_exceeded",
        4: "context_length_exceeded",
    }
    assert answers.finished[1] is SequenceFinish.LENGTH
    assert len(answers.tokens[1]) == 1
    assert answers.tokens[9] == solo(request(9, [1, 2]))


@pytest.mark.parametrize("num_steps", [21, 22])
def test_an_abort_beside_the_last_step_ends_once(num_steps: int) -> None:
    """It comes just before the token that would end the answer, or just behind it (B36)."""
    engine, answers = make_engine(), Answers()
    command = request(1, long_prompt(1, 40), max_tokens=20)
    engine.add(command)
    for _ in range(num_steps):
        answers.take(engine.step())
    engine.abort([1])
    while engine.has_work:
        answers.take(engine.step())
    assert answers.tokens[1] == solo(command)[: num_steps - 2]
    assert (1 in answers.finished) == (num_steps == 22)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_several_answers_to_one_prompt_each_end_in_their_own_way() -> None:
    """One of three seeds says a stop token, the others go on to their length (B17)."""
    commands = [request(i, [1, 2, 3], temperature=1.0) for i in (1, 2, 3)]
    ends = set(solo(commands[1])) - {*solo(commands[0]), *solo(commands[2])}
    stopping = [
        request(i, [1, 2, 3], temperature=1.0, stop_token_ids=tuple(ends)) for i in (1, 2, 3)
    ]
    answers = run(make_engine(), *stopping)
    assert answers.finished == {
        1: SequenceFinish.LENGTH,
        2: SequenceFinish.STOP,
        3: SequenceFinish.LENGTH,
    }
    assert answers.tokens == {command.seq_id: solo(command) for command in stopping}

"""Decodes from graphs: the same rows as without, and no row of padding touches anybody's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_worker.attention.base import KVCacheSpec, PackedBatch
from headrace_worker.engine.cuda_capture import try_to_record
from headrace_worker.engine.graphs import GraphedDecoder, GraphLimits, graph_sizes
from support.fake_capture import FakeCapture
from support.oracle import OracleBackend, OracleDecoder, make_engine, request, run, solo


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_there_is_a_size_for_every_batch_and_little_padding(
    max_num_seqs: int, sizes: tuple[int, ...]
) -> None:
    """Powers of two, then every eighth; the last is the largest batch that can be."""
    assert graph_sizes(max_num_seqs) == sizes


def test_very_large_batches_have_no_graph() -> None:
    """Their steps take long enough for Python, and each graph takes memory."""
    assert graph_sizes(4096)[-1] == 512


def test_the_largest_graph_is_captured_first() -> None:
    """The others fit into the memory that it took."""
    capture = FakeCapture()
    make_engine(max_num_seqs=20, capture=capture, max_num_batched_tokens=32)
    assert capture.sizes == [20, 16, 8, 4, 2, 1]


@pytest.mark.parametrize("one_ahead", [False, True], ids=["synchronous", "one-ahead"])
@pytest.mark.parametrize("num_seqs", [1, 3, 4, 5, 8])
def test_a_padded_batch_gives_every_sequence_its_own_tokens(num_seqs: int, one_ahead: bool) -> None:
    """With any number of rows of padding beside it, whoever leaves meanwhile."""
    capture = FakeCapture()
    engine = make_engine(capture=capture, one_ahead=one_ahead)
    commands = [
        request(i, [i, 9], max_tokens=3 + 2 * i, temperature=1.0) for i in range(1, num_seqs + 1)
    ]
    answers = run(engine, *commands)
    assert answers.tokens == {command.seq_id: solo(command) for command in commands}
    assert capture.replayed[-1] == 1
    assert max(capture.replayed) == next(size for size in (1, 2, 4, 8) if size >= num_seqs)


def test_a_step_with_a_chunk_runs_without_a_graph() -> None:
    """A graph holds one token a sequence."""
    capture = FakeCapture()
    engine = make_engine(capture=capture, max_num_batched_tokens=8)
    run(engine, request(1, [1] * 20, max_tokens=1))
    assert capture.replayed == [1] * (20 % 8 == 1)
    run(engine, request(2, [2] * 4, max_tokens=2))
    assert capture.replayed == [1]


def test_a_batch_beyond_the_largest_graph_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is refused for want of a graph."""
    monkeypatch.setattr("headrace_worker.engine.graphs._LARGEST", 2)
    capture = FakeCapture()
    engine = make_engine(capture=capture)
    commands = [request(i, [i], max_tokens=4) for i in (1, 2, 3)]
    assert run(engine, *commands).tokens == {c.seq_id: solo(c) for c in commands}
    assert capture.replayed == []


def test_padding_lies_in_the_trash_block_even_when_the_pool_is_full() -> None:
    """A batch of three padded to four leaves the last real slot as it was (B47)."""
    capture = FakeCapture()
    engine = make_engine(num_blocks=6, block_size=1, capture=capture, max_model_len=6)
    commands = [request(i, [i], max_tokens=2) for i in (1, 2, 3)]
    answers = run(engine, *commands)
    assert capture.replayed == [4, 4]
    assert answers.tokens == {c.seq_id: solo(c) for c in commands}
    backend: Any = engine.runner.backend  # type: ignore[attr-defined]
    trash = backend.cache[: backend.block_bytes]
    assert trash != b"\xff" * backend.block_bytes


def test_what_a_replay_reads_is_all_in_tensors_that_stay_where_they_are() -> None:
    """Same objects, sizes and host numbers in every replay: only their contents change."""
    seen: dict[int, set[tuple[Any, ...]]] = {}

    def note(batch: PackedBatch) -> None:
        if batch.num_tokens == batch.num_decodes:
            tensors = (batch.input_ids, batch.positions, batch.slot_mapping, batch.seq_lens)
            places = tuple(t.data_ptr() for t in (*tensors, batch.block_table, batch.cu_seqlens_q))
            numbers = (batch.max_seqlen_q, batch.max_seqlen_k, batch.block_table.shape)
            seen.setdefault(batch.num_tokens, set()).add((places, numbers))

    engine = make_engine(decoder=OracleDecoder(on_forward=note), capture=FakeCapture())
    run(engine, *[request(i, [i] * 3, max_tokens=12 + i) for i in range(1, 6)])
    assert {size: len(kinds) for size, kinds in seen.items()} == dict.fromkeys((1, 2, 4, 8), 1)
    assert torch.is_inference_mode_enabled() is False


def test_a_device_that_cannot_record_runs_without_graphs() -> None:
    """The worker starts, and says why it is slower."""

    def refuse(compute: object) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    decoder, backend = OracleDecoder(), OracleBackend()
    backend.allocate(KVCacheSpec(1, 1, 1, torch.int64, torch.device("cpu"), 4), 2)
    graphed = GraphedDecoder(decoder, backend, GraphLimits((1, 2), 4, 16), torch.device("cpu"))
    with pytest.warns(UserWarning, match="without CUDA graphs: operation not permitted"):
        assert try_to_record(graphed, decoder, refuse) is decoder

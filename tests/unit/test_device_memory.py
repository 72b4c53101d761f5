"""What a device's memory is spent on: measured with the largest step, and the rest is KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace_worker.attention import KVCacheSpec
from headrace_worker.attention.reference import ReferenceBackend
from headrace_worker.engine import largest_step
from headrace_worker.engine.accelerator import Accelerator, graphs_obstacle
from headrace_worker.engine.device_memory import MemoryUse, measure, measure_two_graphs
from headrace_worker.engine.errors import SettingsError
from headrace_worker.engine.graphs import GraphedDecoder, GraphLimits
from headrace_worker.engine.largest_step import LargestStep
from headrace_worker.engine.loader import _Parts, load_engine
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.model import LoadedModel, load_model
from headrace_worker.model.ranks import ALONE
from support.fake_capture import FakeCapture
from support.oracle_backend import OracleBackend, OracleDecoder
from support.tiny_models import make_tiny_llama

CPU = torch.device("cpu")
GIB = 2**30
STEP = LargestStep(
    num_tokens=40, num_seqs=4, num_rows=6, max_model_len=64, block_size=16, num_steps_in_flight=2
)


class FakeMeter:
    """A device of 80 GiB, 60 of them free until a graph is recorded, which takes one."""

    def __init__(self, capture: FakeCapture | None = None) -> None:
        self.num_measured = 0  # runs that were measured
        self._capture = capture

    def total_bytes(self) -> int:
        return 80 * GIB

    def free_bytes(self) -> int:
        return 60 * GIB - len(self._capture.sizes if self._capture else ()) * GIB

    def peak_bytes(self, run: Callable[[], None]) -> int:
        run()
        self.num_measured += 1
        return 3 * GIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny Llama."""
    torch.set_num_threads(1)
    folder = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load_model(folder, dtype=torch.float32, device=CPU)


def accelerator(model: LoadedModel, **settings: object) -> Accelerator:
    """Return one over a CPU, for steps of 40 tokens."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 40, **settings}
    config = model.config
    spec = KVCacheSpec(
        config.num_layers, config.num_kv_heads, config.head_dim, torch.float32, CPU, block_size=16
    )
    chosen = EngineSettings("m", **options)  # type: ignore[arg-type]
    return Accelerator(chosen, model.decoder, ReferenceBackend(), spec, 64, num_ranks=1)


def test_kv_blocks_take_what_the_allowed_share_leaves() -> None:
    """Of 80 GiB a tenth stays free; 20 are taken, 3 are for activations and 2 for graphs."""
    use = MemoryUse(80 * GIB, 60 * GIB, activation_bytes=3 * GIB, graph_bytes=2 * GIB)
    assert use.kv_cache_bytes(1.0) == 55 * GIB
    assert use.kv_cache_bytes(0.9) == pytest.approx(47 * GIB, abs=1)
    assert use.kv_cache_bytes(0.25) < 0


def test_the_first_run_of_a_step_is_not_what_is_measured() -> None:
    """It compiles kernels and takes workspaces, which stay and so are no longer free."""
    meter, runs = FakeMeter(), list[int]()
    use = measure(meter, lambda: runs.append(meter.num_measured), None, num_graphs=0)
    assert runs == [0, 0]
    assert use == MemoryUse(80 * GIB, 60 * GIB, activation_bytes=3 * GIB, graph_bytes=0)


@pytest.mark.parametrize(("num_graphs", "expected"), [(1, 5), (2, 7), (10, 23)])
def test_two_graphs_say_what_all_of_them_take(num_graphs: int, expected: int) -> None:
    """The largest brings the memory that the others share; each of those adds as much again."""
    use = measure(FakeMeter(), lambda: None, lambda: (5, 2), num_graphs=num_graphs)
    assert use.graph_bytes == expected


@pytest.mark.parametrize(("sizes", "expected"), [((1, 2, 4), (GIB, GIB)), ((1,), (GIB, 0))])
def test_the_two_largest_graphs_are_recorded_to_be_measured(
    sizes: tuple[int, ...], expected: tuple[int, int]
) -> None:
    """One after the other, and no more, because each takes time."""
    backend, capture = OracleBackend(), FakeCapture()
    backend.allocate(KVCacheSpec(1, 1, 1, torch.int64, CPU, 4), 2)
    backend.may_pad = True
    graphed = GraphedDecoder(OracleDecoder(), backend, GraphLimits(sizes, 4, 16), CPU)
    assert measure_two_graphs(FakeMeter(capture), graphed, capture, sizes) == expected
    assert capture.sizes == list(sizes[-2:][::-1])


def test_the_largest_step_has_all_sequences_and_all_of_the_budget() -> None:
    """Three long decodes, and what they leave of the budget is one chunk at the end of a fourth."""
    batch = STEP.batch(CPU)
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 3, 40]
    assert batch.seq_lens.tolist() == [64] * 4
    assert batch.positions.tolist() == [63, 63, 63, *range(27, 64)]
    assert (batch.num_decodes, batch.max_seqlen_q, batch.max_seqlen_k) == (3, 37, 64)
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_largest_step_touches_the_trash_block_alone() -> None:
    """It may be computed before there is a cache worth the name."""
    batch = STEP.batch(CPU)
    assert set(batch.slot_mapping.tolist()) == {0}
    assert batch.block_table.tolist() == [[0] * 4] * 4


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "num_new"),
    [(1, 1, [1]), (4, 4, [1, 1, 1, 1]), (500, 2, [1, 64]), (8, 1, [8])],
)
def test_a_chunk_is_no_longer_than_a_context(
    num_tokens: int, num_seqs: int, num_new: list[int]
) -> None:
    """However large the budget, a sequence ends with the context."""
    step = LargestStep(num_tokens, num_seqs, 64, 64, 16, num_steps_in_flight=1)
    assert step.batch(CPU).cu_seqlens_q.diff().tolist() == num_new


def test_the_largest_step_is_drawn_from_in_float32(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a real one is, also of a model whose logits have 16 bits; half of it would be too few."""
    drawn: list[tuple[torch.dtype, int]] = []
    monkeypatch.setattr(
        largest_step, "draw_ahead", lambda logits, draws: drawn.append((logits.dtype, len(draws)))
    )
    logits = model.decoder.logits
    monkeypatch.setattr(model.decoder, "logits", lambda rows: logits(rows).bfloat16())
    accelerator(model).survey(FakeMeter())
    assert drawn == 2 * [(torch.float32, 64)]


@pytest.mark.parametrize(
    ("num_keys", "seq_lens"), [(None, [64] * 4), (80, [20, 20, 20, 37]), (2, [1, 1, 1, 37])]
)
def test_contexts_are_no_longer_than_a_cache_of_a_given_size_holds(
    num_keys: int | None, seq_lens: list[int]
) -> None:
    """A small cache is no reason to refuse a backend whose steps take memory by the key."""
    assert replace(STEP, max_num_keys=num_keys).batch(CPU).seq_lens.tolist() == seq_lens


def test_a_cache_of_a_given_size_bounds_the_step_that_is_measured(model: LoadedModel) -> None:
    """By the tokens that it holds."""
    assert accelerator(model).largest_step().max_num_keys is None
    sized = accelerator(model, kv_cache_memory_bytes=2**20)
    assert sized.largest_step().max_num_keys == 2**20 // sized.spec.bytes_per_token


def test_a_survey_computes_the_step_and_harms_no_block(model: LoadedModel) -> None:
    """The real decoder runs it; behind the trash block the cache is as it was allocated."""
    surveyed = accelerator(model)
    meter = FakeMeter()
    use = surveyed.survey(meter)
    assert (meter.num_measured, use.activation_bytes, use.graph_bytes) == (1, 3 * GIB, 0)
    backend = surveyed.backend
    assert isinstance(backend, ReferenceBackend)
    assert all(not rows[16:].any() and rows[:16].any() for rows in backend.cache.key)
    assert all(bool(rows.isfinite().all()) for rows in backend.cache.value)


def test_settings_whose_step_does_not_fit_are_named(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker does not start, and says which numbers are too large."""

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr(model.decoder, "forward", fail)
    with pytest.raises(SettingsError, match=r"tokens 40 and max_num_seqs 4: .* 9\.00 GiB"):
        accelerator(model).survey(FakeMeter())


def test_a_cpu_records_nothing_and_stays_in_step_unless_told(model: LoadedModel) -> None:
    """Both are for devices that compute while Python goes on."""
    default = accelerator(model)
    assert (default.records_graphs, default.is_one_ahead) == (False, False)
    assert default.with_graphs(model.decoder) is model.decoder
    assert default.largest_step().num_steps_in_flight == 1
    assert accelerator(model, one_ahead=True).largest_step().num_steps_in_flight == 2


def test_there_are_as_many_rows_of_logits_as_ever_at_once() -> None:
    """Scores of prompts take some even where few sequences run."""
    rows = LargestStep(8, 2, 64, 32, 4, num_steps_in_flight=1).batch(CPU).logit_rows
    assert rows.tolist() == [row % 8 for row in range(64)]


@pytest.mark.parametrize(
    ("device", "backend", "is_native", "num_ranks", "obstacle"),
    [
        ("cuda", "flash", True, 1, None),
        ("cuda:1", "triton", True, 1, None),
        ("cpu", "native", True, 1, "graphs are CUDA's, and the device is 'cpu'"),
        ("cuda", "reference", True, 1, "attention by 'reference' waits for the device"),
        ("cuda", "flash", False, 1, "the model runs on transformers' code"),
        ("cuda", "flash", True, 2, "over 2 ranks they have not been tried"),
    ],
)
def test_what_keeps_decodes_from_being_recorded_is_named(
    device: str, backend: str, is_native: bool, num_ranks: int, obstacle: str | None
) -> None:
    """A worker decides by it, and the doctor tells it."""
    found = graphs_obstacle(torch.device(device), backend, is_native=is_native, num_ranks=num_ranks)
    assert found == obstacle


@pytest.mark.parametrize(("given", "kv_cache_bytes"), [(None, 52 * GIB), (7 * GIB, 7 * GIB)])
def test_on_a_gpu_what_steps_take_is_measured_whoever_sizes_the_cache(
    model: LoadedModel, given: int | None, kv_cache_bytes: int
) -> None:
    """A worker that is told how large its KV cache is reports no estimate beside it."""
    settings = EngineSettings("m", kv_cache_memory_bytes=given, gpu_memory_utilization=0.9625)
    backend, gpu = ReferenceBackend(), torch.device("cuda")
    parts = _Parts(settings, model, backend, gpu, torch.float32, ALONE)
    surveyed: Any = SimpleNamespace(
        survey=lambda meter: MemoryUse(80 * GIB, 60 * GIB, 3 * GIB, 2 * GIB)
    )
    assert parts._divide_memory(surveyed) == (pytest.approx(kv_cache_bytes, abs=1), 5 * GIB)


def test_a_cache_that_the_device_has_no_memory_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked for too much reads how much that was, and no trace of Python."""

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr(ReferenceBackend, "allocate", fail)
    settings = EngineSettings(
        str(make_tiny_llama(tmp_path)), device="cpu", block_size=16, num_threads=1,
        kv_cache_memory_bytes=2**20, attention_backend="reference",
    )  # fmt: skip
    with pytest.raises(SettingsError, match=r"cache of \d+ blocks of 16 tokens, .* 9\.00 GiB"):
        load_engine(settings)

"""The elementwise Triton kernels: what torch's operators compute, on strided rows too."""

from __future__ import annotations

import pytest
import torch

from headrace_worker.attention import AttentionBackend, KVCacheSpec
from headrace_worker.attention.cpu import CpuBackend
from headrace_worker.attention.reference import ReferenceBackend
from headrace_worker.attention.triton import TritonBackend
from headrace_worker.model.activations import ACTIVATIONS
from headrace_worker.model.config import from_transformers
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.kv_place import KVPlace
from headrace_worker.model.norm import Norm
from headrace_worker.model.rope import Rotation, rotate
from headrace_worker.model.row_ops import TORCH_ROW_OPS, TorchRowOps, best_row_ops
from headrace_worker.model.triton_row_ops import TritonRowOps
from support.packed import Share, pack
from support.tiny_models import build_tiny_model

pytest.importorskip("triton", reason="Triton is not installed on this machine")
from headrace_worker.kernels_triton.rotary import rotate_and_store

# The interpreter rounds to bfloat16 by cutting off, which is up to a step at each rounding.
EXACT = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-10}
OPS = TritonRowOps()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # it is meant to


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare to a step of the dtype, or a few of bfloat16."""
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def rotation_of(num_tokens: int, rotary_dim: int, dtype: torch.dtype) -> Rotation:
    """Return angles as RotaryTable gives them."""
    angles = draw(num_tokens, 1, rotary_dim // 2, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


@DTYPES
@pytest.mark.parametrize("size", [64, 65, 576])
@pytest.mark.parametrize("is_centred", [False, True])
def test_a_norm(dtype: torch.dtype, size: int, is_centred: bool) -> None:
    """Mean square, root and weight give what the reference gives, in any width."""
    norm = Norm(draw(size, dtype=dtype), 1e-5, is_centred=is_centred)
    rows = draw(3, size, dtype=dtype, seed=1)
    assert_near(OPS.norm(rows, norm), norm(rows))


@DTYPES
def test_adding_before_a_norm(dtype: torch.dtype) -> None:
    """What comes in is added in place, and then normalized."""
    norm = Norm(draw(96, dtype=dtype), 1e-6, is_centred=False)
    hidden, delta = draw(4, 96, dtype=dtype), draw(4, 96, dtype=dtype, seed=1)
    expected = hidden + delta
    normed = OPS.add_norm(hidden, delta, norm)
    assert_near(hidden, expected)
    assert_near(normed, norm(expected))


def test_nothing_to_add_leaves_the_rows_alone() -> None:
    """Without an addend it is the norm alone."""
    norm = Norm(draw(32, dtype=torch.float32), 1e-6, is_centred=False)
    hidden = draw(4, 32, dtype=torch.float32)
    before = hidden.clone()
    assert_near(OPS.add_norm(hidden, None, norm), norm(before))
    assert torch.equal(hidden, before)


def test_a_norm_of_heads_within_a_fused_projection() -> None:
    """Heads are normalized one by one where they lie, and come out next to each other."""
    norm = Norm(draw(16, dtype=torch.float32), 1e-6, is_centred=False)
    fused = draw(5, 9, 16, dtype=torch.float32)
    normed = OPS.norm(fused[:, 4:6], norm)
    assert normed.is_contiguous()
    assert_near(normed, norm(fused[:, 4:6]))


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [48, 1030])
def test_a_gate(dtype: torch.dtype, activation: str, size: int) -> None:
    """The activated half times the other, narrow or wider than one program takes."""
    gate_up = 3 * draw(3, 2 * size, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_near(OPS.gate(gate_up, activation), ACTIVATIONS[activation](gate).mul_(up))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_gate_far_out_is_zero_or_open(activation: str) -> None:
    """Numbers beyond what an exponential can hold give zero or themselves, and no NaN."""
    gate_up = torch.tensor([[-300.0, 300.0, -1e4, 1e4, 2.0, 2.0, 2.0, 2.0]])
    assert OPS.gate(gate_up, activation).tolist() == [[0.0, 600.0, 0.0, 2e4]]


@EXACT
@pytest.mark.parametrize("rotary_dim", [16, 12, 8])
def test_a_rotation_in_place(dtype: torch.dtype, rotary_dim: int) -> None:
    """To the bit what the reference gives; dimensions that do not turn stay."""
    heads = draw(4, 3, 16, dtype=dtype)
    rotation = rotation_of(4, rotary_dim, dtype)
    expected = rotate(heads.clone(), rotation)
    rotated = OPS.rotate(heads, rotation)
    assert rotated is heads
    assert torch.equal(rotated, expected)


@EXACT
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_a_rotation_that_writes_to_the_cache(dtype: torch.dtype, rotary_dim: int) -> None:
    """Keys are turned and land in their slots beside the values; no other slot is touched."""
    fused = draw(4, 3 + 2 * 2, 16, dtype=dtype)
    rotation, slots = rotation_of(4, rotary_dim, dtype), torch.tensor([7, 2, 9, 4])
    expected, value = rotate(fused[:, :5].clone(), rotation), fused[:, 5:].clone()
    caches = (torch.zeros(12, 2, 16, dtype=dtype), torch.zeros(12, 2, 16, dtype=dtype))
    query = rotate_and_store(fused[:, :5], fused[:, 5:], rotation, caches, slots)
    assert torch.equal(query, expected[:, :3])
    assert torch.equal(caches[0][slots], expected[:, 3:])
    assert torch.equal(caches[1][slots], value)
    others = [slot for slot in range(12) if slot not in slots.tolist()]
    assert not any(cache[others].any() for cache in caches)


def test_normed_heads_lie_elsewhere_than_values() -> None:
    """Queries and keys that were normed are a tensor of their own, with strides of their own."""
    fused, normed = draw(4, 7, 16, dtype=torch.float32), draw(4, 5, 16, dtype=torch.float32, seed=1)
    rotation, slots = rotation_of(4, 16, torch.float32), torch.arange(1, 5)
    expected = rotate(normed.clone(), rotation)
    caches = (torch.zeros(5, 2, 16), torch.zeros(5, 2, 16))
    assert torch.equal(
        rotate_and_store(normed, fused[:, 5:], rotation, caches, slots), expected[:, :3]
    )
    assert torch.equal(caches[0][1:], expected[:, 3:])
    assert torch.equal(caches[1][1:], fused[:, 5:])


@pytest.mark.parametrize("backend", [TritonBackend, ReferenceBackend, CpuBackend])
def test_a_layer_leaves_the_same_cache_by_one_launch_or_two(
    backend: type[AttentionBackend],
) -> None:
    """Whatever the layout, what is read back is what a rotation and then a write leave."""
    batch = pack([Share([0] * 5, 0, [2, 1])], block_size=4)
    spec = KVCacheSpec(1, 2, 16, torch.float32, torch.device("cpu"), 4)
    rotation, results = rotation_of(5, 16, torch.float32), []
    for ops in (OPS, TORCH_ROW_OPS):
        own = backend()
        own.allocate(spec, 3)
        own.begin(batch)
        fused = draw(5, 8, 16, dtype=torch.float32)
        place = KVPlace(0, batch, own)
        query = ops.rotate_and_write(fused[:, :6], fused[:, 6:], rotation, place)
        results.append(own.attend(query, 0, batch, scale=0.25))
    torch.testing.assert_close(*results, atol=2e-6, rtol=2e-6)


def test_a_layer_that_rotates_takes_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole forward over slots never writes to the cache by itself."""
    config = from_transformers(build_tiny_model("qwen3").config, ())
    decoder, backend = Decoder(config, torch.float32, torch.device("cpu")), TritonBackend()
    for tensor in decoder.parameters().values():
        tensor.fill_(0.1)
    for layer in decoder.layers:
        layer.row_ops = OPS
    backend.allocate(KVCacheSpec(2, 2, 16, torch.float32, torch.device("cpu"), 4), 3)
    monkeypatch.setattr(backend, "write_kv", None)
    assert decoder.forward(pack([Share([3, 4, 5], 0, [1])], 4), backend).isfinite().all()
    assert backend.cache.key[1][4:7].any()


def test_a_rotation_in_bfloat16() -> None:
    """Near the reference, as far as the interpreter can tell."""
    heads, rotation = draw(4, 3, 16, dtype=torch.bfloat16), rotation_of(4, 16, torch.bfloat16)
    expected = rotate(heads.clone(), rotation)
    torch.testing.assert_close(OPS.rotate(heads, rotation), expected, atol=2**-5, rtol=2**-5)


def test_nan_stays_in_its_row() -> None:
    """A broken row is broken afterwards, and alone."""
    norm = Norm(torch.ones(32), 1e-6, is_centred=False)
    rows = draw(3, 32, dtype=torch.float32)
    rows[1, 5] = float("nan")
    for result in (OPS.norm(rows, norm), OPS.gate(rows, "silu")):
        assert result.isnan().any(dim=-1).tolist() == [False, True, False]


def test_no_rows_are_no_launch() -> None:
    """An empty step gives empty results."""
    norm = Norm(torch.ones(32), 1e-6, is_centred=False)
    assert OPS.norm(torch.empty(0, 32), norm).shape == (0, 32)
    assert OPS.gate(torch.empty(0, 32), "silu").shape == (0, 16)
    assert OPS.rotate(torch.empty(0, 3, 16), rotation_of(0, 16, torch.float32)).shape == (0, 3, 16)


@pytest.mark.parametrize(("obstacle", "name"), [(None, "triton"), ("no GPU", "torch")])
def test_cuda_takes_these_kernels_where_triton_runs(
    obstacle: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not, torch's own operators are there."""
    monkeypatch.setattr(TritonBackend, "obstacle", lambda need: obstacle)
    ops = best_row_ops(torch.bfloat16, torch.device("cuda:0"))
    assert isinstance(ops, TritonRowOps if name == "triton" else TorchRowOps)

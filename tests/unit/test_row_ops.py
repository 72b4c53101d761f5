"""The elementwise kernels: what torch's operators compute, and no row depends on another."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from headrace_worker.attention.base import AttentionBackend, KVCacheSpec
from headrace_worker.attention.cpu import CpuBackend
from headrace_worker.attention.native import NativeBackend
from headrace_worker.kernels import load_kernels
from headrace_worker.kernels.row_checks import find_differences
from headrace_worker.model.kv_place import KVPlace
from headrace_worker.model.norm import Norm
from headrace_worker.model.row_ops import (
    TORCH_ROW_OPS,
    KernelRowOps,
    RowOps,
    TorchRowOps,
    best_row_ops,
)
from support.packed import Share, pack

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Whole vectors, one element more, less than one vector, and SmolLM2's.
SIZES = pytest.mark.parametrize("size", [64, 65, 6, 576])

Operation = Callable[[RowOps, torch.Tensor], torch.Tensor]


@pytest.fixture
def kernels() -> KernelRowOps:
    """Give the kernels, where this machine can have them."""
    if (reason := load_kernels().missing_reason) is not None:
        pytest.skip(f"a C++ compiler is not installed on this machine: {reason}")
    return KernelRowOps()


def norm_of(size: int, dtype: torch.dtype, *, is_centred: bool = False) -> Norm:
    """Return a norm with weights near one."""
    generator = torch.Generator().manual_seed(size)
    weight = 1 + torch.randn(size, generator=generator) / 8
    return Norm(weight.to(dtype), 1e-5, is_centred=is_centred)


def rows_of(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random rows of very different lengths."""
    generator = torch.Generator().manual_seed(num_rows)
    lengths = torch.logspace(-2, 2, num_rows)[:, None]
    return (torch.randn(num_rows, size, generator=generator) * lengths).to(dtype)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Allow sums in another order: a last bit of float32, one step of bfloat16."""
    assert found.dtype == wanted.dtype
    if found.dtype == torch.bfloat16:
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
        assert (found == wanted).float().mean() > 0.99
    else:
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)


@DTYPES
@SIZES
@pytest.mark.parametrize("is_centred", [False, True])
def test_a_norm_is_torchs(
    kernels: KernelRowOps, size: int, is_centred: bool, dtype: torch.dtype
) -> None:
    """Plain or centred, of whole rows or of heads within wider rows, norms are torch's."""
    norm = norm_of(size, dtype, is_centred=is_centred)
    rows = rows_of(9, size, dtype)
    assert_close(kernels.norm(rows, norm), TORCH_ROW_OPS.norm(rows, norm))
    heads = rows_of(9, 5 * size, dtype).view(9, 5, size)[:, 1:4]
    assert_close(kernels.norm(heads, norm), TORCH_ROW_OPS.norm(heads, norm))


@DTYPES
@SIZES
def test_adding_before_a_norm_rounds_as_torch_does(
    kernels: KernelRowOps, size: int, dtype: torch.dtype
) -> None:
    """The residual has torch's bits, and the norm is that of the rounded sum."""
    norm, delta = norm_of(size, dtype), rows_of(9, size, dtype).flip(0)
    ours, theirs = rows_of(9, size, dtype), rows_of(9, size, dtype)
    assert_close(kernels.add_norm(ours, delta, norm), TORCH_ROW_OPS.add_norm(theirs, delta, norm))
    assert torch.equal(ours, theirs)
    assert_close(kernels.add_norm(ours, None, norm), TORCH_ROW_OPS.norm(theirs, norm))


@DTYPES
@SIZES
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_gate_has_torchs_bits(
    kernels: KernelRowOps, activation: str, size: int, dtype: torch.dtype
) -> None:
    """In bfloat16 every bit is torch's, and in float32 all but the last."""
    rows = rows_of(9, 2 * size, dtype)
    found, wanted = (ops.gate(rows, activation) for ops in (kernels, TORCH_ROW_OPS))
    if dtype == torch.bfloat16:
        assert (found == wanted).float().mean() > 0.999
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=1e-6)


@DTYPES
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 32), (8, 8), (80, 20)])
def test_a_rotation_has_torchs_bits(
    kernels: KernelRowOps, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    """Heads within wider rows turn in place, whole or in part, and nothing else changes."""
    angles = rows_of(7, rotary_dim // 2, torch.float32)
    cos, sin = angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]
    rotation = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    fused = rows_of(7, 5 * head_dim, dtype).view(7, 5, head_dim)
    wanted = torch.cat((TORCH_ROW_OPS.rotate(fused[:, :3], rotation), fused[:, 3:]), 1)
    kernels.rotate(fused[:, :3], rotation)
    assert torch.equal(fused, wanted)


@DTYPES
@pytest.mark.parametrize("backend", [NativeBackend, CpuBackend])
@pytest.mark.parametrize("block_size", [4, 32])
def test_a_rotation_that_writes_leaves_the_same_cache(
    kernels: KernelRowOps, backend: type[AttentionBackend], block_size: int, dtype: torch.dtype
) -> None:
    """In one pass or in two: every bit that attention reads back is the same."""
    batch = pack([Share([0] * 40, 0, list(range(1, 11))), Share([0], 3, [11])], block_size)
    cos, sin = (rows_of(41, 8, dtype)[:, None] for _ in range(2))
    rotation = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    rows, results = rows_of(41, 5 * 16, dtype).view(41, 5, 16), []
    for ops in (kernels, TORCH_ROW_OPS):
        own = backend()
        own.allocate(KVCacheSpec(1, 1, 16, dtype, CPU, block_size), 12)
        own.begin(batch)
        fused = rows.clone()
        query = ops.rotate_and_write(fused[:, :4], fused[:, 4:], rotation, KVPlace(0, batch, own))
        results.append(own.attend(query, 0, batch, scale=0.25))
    assert torch.equal(*results)


def _norm(ops: RowOps, rows: torch.Tensor) -> torch.Tensor:
    return ops.norm(rows, norm_of(rows.shape[1], rows.dtype))


def _add_norm(ops: RowOps, rows: torch.Tensor) -> torch.Tensor:
    return ops.add_norm(rows.clone(), rows * 3, norm_of(rows.shape[1], rows.dtype))


def _gate(ops: RowOps, rows: torch.Tensor) -> torch.Tensor:
    return ops.gate(rows, "silu")


@DTYPES
@pytest.mark.parametrize("operation", [_norm, _add_norm, _gate])
def test_a_row_does_not_depend_on_its_company(
    kernels: KernelRowOps, two_threads: None, operation: Operation, dtype: torch.dtype
) -> None:
    """A row has the same bits alone, among hundreds, and beside a row of NaN."""
    rows = rows_of(300, 130, dtype)
    rows[1] = float("nan")
    whole = operation(kernels, rows)
    for row in (0, 2, 150, 299):
        assert torch.equal(operation(kernels, rows[row : row + 1])[0], whole[row])


def test_a_kernel_that_computes_something_else_is_found(kernels: KernelRowOps) -> None:
    """The check after loading finds nothing in sound kernels, and a broken one by its name."""
    assert list(find_differences()) == []
    gelu_tanh_mul = torch.ops.headrace.gelu_tanh_mul
    with patch.object(torch.ops.headrace, "silu_mul", gelu_tanh_mul):
        found = list(find_differences())
    assert found == ["silu_mul in torch.float32", "silu_mul in torch.bfloat16"]


def test_what_has_no_kernels_runs_on_torch() -> None:
    """Half precision on a CPU, and every format elsewhere, is torch's."""
    assert isinstance(best_row_ops(torch.float16, CPU), TorchRowOps)
    assert isinstance(best_row_ops(torch.float32, torch.device("meta")), TorchRowOps)


def test_what_has_kernels_runs_on_them(kernels: KernelRowOps) -> None:
    """Float32 and bfloat16 on a CPU take the kernels."""
    assert isinstance(best_row_ops(torch.float32, CPU), KernelRowOps)
    assert isinstance(best_row_ops(torch.bfloat16, CPU), KernelRowOps)

"""Projections in eight bits: near the product they stand for, and exact in any company."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.kernels import load_kernels
from headrace_worker.model import load_model
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.eight_bits import quantize_rows, scale_rows
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.int8 import Int8Product, can_multiply_int8, int8_product
from headrace_worker.model.linear import Quantize, has_matrix_unit
from support.oracle import request, run
from support.ranks import cut_engine
from support.tiny_models import make_tiny_model

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _needs_exact_products() -> None:
    if not can_multiply_int8(torch.bfloat16):
        pytest.skip("a CPU with exact int8 products is not installed on this machine")


def rows_of(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random rows."""
    generator = torch.Generator().manual_seed(num_rows + size)
    return torch.randn(num_rows, size, generator=generator).to(dtype)


def test_numbers_and_scale_give_the_row_back() -> None:
    """No element is off by more than half a step, and the largest is 127 steps."""
    x = rows_of(5, 40)
    numbers, scales = quantize_rows(x)
    assert numbers.dtype == torch.int8
    assert numbers.abs().amax(-1).tolist() == [127] * 5
    assert ((numbers * scales[:, None] - x).abs() <= 0.5001 * scales[:, None]).all()


@DTYPES
def test_the_kernel_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    """Rows of zeros, of NaN and of infinity are the same to both, too, and so is scaling back."""
    if (reason := load_kernels().missing_reason) is not None:
        pytest.skip(f"a C++ compiler is not installed on this machine: {reason}")
    x = rows_of(9, 70, dtype)
    x[1], x[2], x[3, 5] = 0, float("nan"), float("inf")
    x[4] = torch.tensor([0.0, 1e-38] * 35)  # as good as zeros
    numbers, scales = torch.ops.headrace.quantize_rows(x)
    wanted_numbers, wanted_scales = quantize_rows(x)
    assert torch.equal(numbers, wanted_numbers)
    assert torch.equal(scales.nan_to_num(-1.0), wanted_scales.nan_to_num(-1.0))
    product, bias = rows_of(9, 70, dtype), rows_of(70, 1, dtype)[:, 0].contiguous()
    for added in (None, bias):
        wanted = scale_rows(product, scales, added)
        scaled = product.clone()
        torch.ops.headrace.scale_rows(scaled, scales, added)
        assert torch.equal(scaled.nan_to_num(9.0), wanted.nan_to_num(9.0))


@DTYPES
def test_a_product_is_near_the_exact_one(dtype: torch.dtype) -> None:
    """Eight bits cost about one part in a hundred of a random product, bias included."""
    weight, bias, x = rows_of(48, 576, dtype), rows_of(48, 1, dtype)[:, 0], rows_of(7, 576, dtype)
    exact = x.float() @ weight.float().T + bias.float()
    for make in (Int8Product, int8_product):
        found = make(weight, bias.contiguous())(x)
        assert found.dtype == dtype
        assert (found.float() - exact).norm() / exact.norm() < 0.02


@pytest.mark.skipif(
    not has_matrix_unit(torch.bfloat16), reason="this CPU has no AMX, or there is no C++ compiler"
)
@pytest.mark.parametrize("num_rows", [0, 1, 40])
def test_our_kernel_rounds_the_exact_sum_once(num_rows: int) -> None:
    """Scales and bias are applied to the whole number, in float32."""
    weight, bias = rows_of(50, 70, torch.bfloat16), rows_of(50, 1, torch.bfloat16)[:, 0]
    x = rows_of(num_rows, 70, torch.bfloat16)
    numbers, row_scales = quantize_rows(x)
    of_weight, scales = quantize_rows(weight)
    sums = (numbers.long() @ of_weight.long().T).float()
    wanted = sums * scales * row_scales[:, None] + bias.float()
    assert torch.equal(int8_product(weight, bias.contiguous())(x), wanted.bfloat16())


@DTYPES
@pytest.mark.parametrize(("size_in", "size_out"), [(576, 960), (1536, 576), (30, 50)])
@pytest.mark.parametrize("make", [Int8Product, int8_product])
def test_a_row_does_not_depend_on_its_company(
    make: Quantize, size_in: int, size_out: int, dtype: torch.dtype
) -> None:
    """A row has the same bits in a batch of any size, at any place, and beside a row of NaN."""
    product = make(rows_of(size_out, size_in, dtype), None)
    rows = rows_of(300, size_in, dtype)
    whole = product(rows)
    for num_rows in (1, 2, 3, 5, 9, 16, 17, 32, 33, 63, 65, 129, 256):
        assert torch.equal(product(rows[:num_rows]), whole[:num_rows]), num_rows
        assert torch.equal(product(rows[-num_rows:]), whole[-num_rows:]), num_rows
    rows[7] = float("nan")
    sick = product(rows)
    assert torch.equal(sick[8:], whole[8:])
    assert bool(sick[7].isnan().all())


def test_without_kernels_the_product_has_the_same_bits() -> None:
    """A worker without a compiler answers as one with it."""
    product, x = Int8Product(rows_of(50, 64), None), rows_of(9, 64)
    with_kernels = product(x)
    with patch("headrace_worker.model.int8.kernels_are_loaded", return_value=False):
        assert torch.equal(product(x), with_kernels)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_answers_in_eight_bits_alone_as_in_company(tmp_path: Path, family: str) -> None:
    """Its log-probabilities are the same whoever is beside it, on one rank as on two."""
    settings = EngineSettings(
        model=str(make_tiny_model(tmp_path, family)),
        device="cpu",
        dtype="bfloat16",
        quantization="int8",
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=16 * 2**20,
        enable_prefix_caching=False,
    )
    commands = [request(i, [9 + i] * (3 + i), max_tokens=6, logprobs=5) for i in range(20)]
    for served in (nullcontext(load_engine(settings)), cut_engine(settings, 2)):
        with served as (engine, ready):
            together = run(engine, *commands)
            alone = run(engine, commands[3])
        assert alone.sampled[3] == together.sampled[3]
        assert ready.dtype == "bfloat16"


def test_eight_bits_are_smaller(tmp_path: Path) -> None:
    """The memory that is reported is that of the numbers and their scales."""
    folder = make_tiny_model(tmp_path, "llama")
    plain, small = (
        load_model(folder, dtype=torch.float32, device=CPU).packed(quantization)
        for quantization in ("none", "int8")
    )
    assert isinstance(small.decoder, Decoder)
    projections = [linear for layer in small.decoder.layers for linear in layer.linears]
    assert all(linear.is_packed and not hasattr(linear, "weight") for linear in projections)
    assert small.weights_bytes < plain.weights_bytes


def test_what_cannot_be_quantized_is_refused_by_name(tmp_path: Path) -> None:
    """transformers' own models, other methods and inexact CPUs are refused while loading."""
    folder = make_tiny_model(tmp_path, "llama")
    model = load_model(folder, dtype=torch.float32, device=CPU, model_impl="transformers")
    with pytest.raises(ModelLoadError, match="'int8' is for model_impl 'native' only"):
        model.packed("int8")
    native = load_model(folder, dtype=torch.float32, device=CPU)
    with pytest.raises(ModelLoadError, match="unknown quantization 'awq'; known: none, int8, fp8"):
        native.packed("awq")
    with (
        patch("headrace_worker.model.quantization.can_multiply_int8", return_value=False),
        pytest.raises(ModelLoadError, match="this CPU or torch is not exact"),
    ):
        native.packed("int8")

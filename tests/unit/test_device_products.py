"""Products in eight bits as a GPU makes them: torch's own operators, held to the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.model import load_model
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.device_products import (
    FP8_MULTIPLICATION,
    INT8_MULTIPLICATION,
    DeviceMultiplication,
    DeviceProduct,
    multiplication_obstacle,
    multiply_reference,
)
from headrace_worker.model.eight_bits import FP8, INT8, EightBits, Quantized, quantize_rows
from support.oracle import request, run
from support.tiny_models import make_tiny_model

CPU = torch.device("cpu")
BOTH = (INT8_MULTIPLICATION, FP8_MULTIPLICATION)
OPERATORS = pytest.mark.parametrize("how", BOTH, ids=["int8", "fp8"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def rows_of(num_rows: int, size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return random rows."""
    generator = torch.Generator().manual_seed(num_rows + size)
    return torch.randn(num_rows, size, generator=generator).to(dtype)


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return how far off a result is, as a share of its size."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(("bits", "step"), [(INT8, 1 / 254), (FP8, 1 / 16)])
def test_numbers_and_scale_give_the_row_back(bits: EightBits, step: float) -> None:
    """The largest element becomes the largest number; others are off by half a step at most."""
    x = rows_of(5, 48, torch.float32)
    rows = Quantized(*quantize_rows(x, bits))
    largest = x.abs().amax(-1, keepdim=True)
    assert rows.numbers.dtype == bits.dtype
    assert rows.numbers.float().abs().amax(-1).tolist() == [bits.largest] * 5
    # A float's step is a share of the element itself, a whole number's one of the largest.
    size = x.abs().clamp(min=2**-6 * largest) if bits is FP8 else largest
    assert ((rows.values() - x).abs() <= 1.001 * step * size).all()


@pytest.mark.parametrize("bits", [INT8, FP8], ids=["int8", "fp8"])
def test_a_row_of_next_to_nothing_is_zeros(bits: EightBits) -> None:
    """Zeros, and values whose scale has no inverse in float32, do not become NaN."""
    rows = Quantized(*quantize_rows(torch.tensor([[0.0, 0.0], [1e-38, -2e-39]]), bits))
    assert rows.values().tolist() == [[0.0, 0.0], [0.0, 0.0]]


@OPERATORS
@DTYPES
@pytest.mark.parametrize("num_rows", [1, 16, 17, 40])
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 48), (50, 30)])
def test_the_operator_gives_what_the_reference_gives(
    how: DeviceMultiplication, dtype: torch.dtype, num_rows: int, size_in: int, size_out: int
) -> None:
    """With a bias, for sizes that the operator takes, and for others, which are padded."""
    weight, x = rows_of(size_out, size_in, dtype), rows_of(num_rows, size_in, dtype)
    bias = rows_of(1, size_out, dtype)[0]
    found = DeviceProduct(weight, bias, how)(x)
    wanted = DeviceProduct(weight, bias, replace(how, multiply=multiply_reference))(x)
    assert (found.dtype, found.shape) == (dtype, (num_rows, size_out))
    assert found.is_contiguous()
    assert error_of(found, wanted) < 4e-3  # the last bits of bfloat16
    exact = x.float() @ weight.float().T + bias.float()
    assert error_of(found, exact) < (0.02 if how is INT8_MULTIPLICATION else 0.06)


@OPERATORS
def test_the_operators_get_what_a_gpu_takes(how: DeviceMultiplication) -> None:
    """Rows in order, the weight transposed, sizes in multiples, scales and bias in their types."""
    name = "_int_mm" if how is INT8_MULTIPLICATION else "_scaled_mm"
    weight, bias = rows_of(30, 50, torch.float16), rows_of(1, 30, torch.float16)[0]
    product = DeviceProduct(weight, bias, how)
    with patch.object(torch, name, wraps=getattr(torch, name)) as operator:
        product(rows_of(3, 50, torch.float16))
    rows, columns = operator.call_args.args
    assert rows.is_contiguous()
    assert columns.T.is_contiguous()
    if how is INT8_MULTIPLICATION:
        assert (rows.shape, columns.shape) == ((24, 56), (56, 32))
        return
    assert (rows.shape, columns.shape) == ((3, 64), (64, 32))
    given = operator.call_args.kwargs
    for scale, shape in ((given["scale_a"], (3, 1)), (given["scale_b"], (1, 32))):
        assert (scale.dtype, scale.shape) == (torch.float32, shape)
        assert scale.is_contiguous()
    assert given["bias"].dtype == given["out_dtype"] == torch.bfloat16


def test_whole_numbers_do_not_depend_on_company() -> None:
    """A row has the same bits in a batch of any size, at any place, and beside a row of NaN."""
    product, rows = DeviceProduct(rows_of(50, 72), None, INT8_MULTIPLICATION), rows_of(80, 72)
    whole = product(rows)
    for num_rows in (1, 2, 15, 16, 17, 33, 64):
        assert torch.equal(product(rows[:num_rows]), whole[:num_rows]), num_rows
        assert torch.equal(product(rows[-num_rows:]), whole[-num_rows:]), num_rows
    rows[7] = float("inf")
    assert torch.equal(product(rows)[8:], whole[8:])


@OPERATORS
def test_a_row_that_is_not_finite_stays_alone(how: DeviceMultiplication) -> None:
    """It comes out as NaN, so its request fails, and its neighbours come out as before."""
    product, rows = DeviceProduct(rows_of(48, 64), None, how), rows_of(20, 64)
    healthy = product(rows)
    rows[3, 5], rows[4, 1] = float("nan"), float("-inf")
    sick = product(rows)
    assert bool(sick[3:5].isnan().all())
    assert torch.equal(sick[5:], healthy[5:])


@OPERATORS
def test_outputs_that_are_cut_over_ranks_are_those_of_the_whole(how: DeviceMultiplication) -> None:
    """A scale belongs to an output, so it goes with it."""
    weight, x = rows_of(64, 64), rows_of(20, 64)
    whole = DeviceProduct(weight, None, how)(x)
    parts = [DeviceProduct(half, None, how)(x) for half in weight.chunk(2)]
    assert error_of(torch.cat(parts, dim=1), whole) < (1e-9 if how is INT8_MULTIPLICATION else 4e-3)


@OPERATORS
def test_inputs_that_are_cut_over_ranks_add_up(how: DeviceMultiplication) -> None:
    """Each rank scales its own part of a row, which costs no more than the whole's scale does."""
    weight, x = rows_of(48, 128), rows_of(20, 128)
    halves = zip(weight.chunk(2, dim=1), x.chunk(2, dim=1), strict=True)
    parts = [DeviceProduct(part, None, how)(rows).float() for part, rows in halves]
    exact = x.float() @ weight.float().T
    cut, whole = parts[0] + parts[1], DeviceProduct(weight, None, how)(x)
    assert error_of(cut, exact) < 1.2 * error_of(whole, exact)


def test_a_large_weight_is_quantized_in_parts() -> None:
    """The numbers, their scales and the memory that is reported are those of one pass."""
    weight, x = rows_of(70, 64), rows_of(5, 64)
    whole = DeviceProduct(weight, None, FP8_MULTIPLICATION)
    with patch("headrace_worker.model.device_products._ROWS_AT_ONCE", 32):
        parts = DeviceProduct(weight, None, FP8_MULTIPLICATION)
    assert torch.equal(parts(x), whole(x))
    assert parts.nbytes == whole.nbytes == 80 * 64 + 80 * 4


@OPERATORS
@DTYPES
def test_a_trial_tells_a_true_operator_from_a_false_one(
    how: DeviceMultiplication, dtype: torch.dtype
) -> None:
    """One whose sums stop short is found out, and one that is missing is named."""

    def saturating(*operands: Any) -> torch.Tensor:
        return how.multiply(*operands).clamp(max=2**10)

    def missing(*operands: Any) -> torch.Tensor:
        raise NotImplementedError("no such kernel\nfor this device")

    assert multiplication_obstacle(how, dtype, CPU) is None
    false, absent = (
        multiplication_obstacle(replace(how, multiply=multiply), dtype, CPU)
        for multiply in (saturating, missing)
    )
    assert false is not None
    assert absent is not None
    assert false.startswith("its products are off by 0.")
    assert absent.endswith("cannot multiply it here: no such kernel")


@OPERATORS
def test_a_model_answers_nearly_as_before(tmp_path: Path, how: DeviceMultiplication) -> None:
    """All projections of the layers are quantized; the head is not, and logits stay near."""
    folder = make_tiny_model(tmp_path, "qwen2")  # it has biases
    model = load_model(folder, dtype=torch.bfloat16, device=CPU)
    decoder = model.decoder
    assert isinstance(decoder, Decoder)
    rows = rows_of(6, decoder.config.hidden_size)
    layer = decoder.layers[0]
    before = layer.qkv(rows), layer.gate_up(rows), decoder.head(rows)
    num_more_bytes = decoder.pack(partial(DeviceProduct, how=how))
    after = layer.qkv(rows), layer.gate_up(rows), decoder.head(rows)
    assert num_more_bytes < 0
    assert all(not hasattr(linear, "weight") for each in decoder.layers for linear in each.linears)
    errors = [error_of(new, old) for new, old in zip(after, before, strict=True)]
    assert max(errors[:2]) < 0.06
    assert errors[2] < 4e-3


@OPERATORS
def test_an_engine_serves_what_a_gpu_would_multiply(
    tmp_path: Path, how: DeviceMultiplication
) -> None:
    """All requests are answered; in whole numbers with the same bits alone as in company."""
    settings = EngineSettings(
        model=str(make_tiny_model(tmp_path, "llama")),
        device="cpu",
        dtype="bfloat16",
        quantization="int8",
        kv_cache_memory_bytes=16 * 2**20,
        enable_prefix_caching=False,
    )
    chosen = partial(DeviceProduct, how=how)
    with (
        patch("headrace_worker.model.quantization.can_multiply_int8", return_value=True),
        patch("headrace_worker.model.loading.quantize_for", return_value=chosen),
    ):
        engine, _ = load_engine(settings)
    commands = [request(i, [9 + i] * (3 + i), max_tokens=6, logprobs=5) for i in range(20)]
    together, alone = run(engine, *commands), run(engine, commands[3])
    assert all(len(together.sampled[i]) == 6 for i in range(20))
    if how is INT8_MULTIPLICATION:
        assert alone.sampled[3] == together.sampled[3]

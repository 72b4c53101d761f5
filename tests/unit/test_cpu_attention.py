"""The CPU backend: neighbours change no bit of a sequence, and the plan of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headrace_worker.attention import available_backends, create_backend
from headrace_worker.attention.capped import attend_capped
from headrace_worker.attention.plan import length_class, plan_step
from headrace_worker.attention.registry import UnknownBackend
from headrace_worker.kernels import load_kernels
from support.attention_cases import CPU, Case, draw, only, solve
from support.packed import Share, pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_neighbours_change_no_bit(
    dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    """A decode or chunk gets the same bits alone as between short and long neighbours."""
    torch.set_num_threads(1)
    shares = ((20, 1), (0, 1), (63, 1), (64, 1), (700, 1), (5, 7), (0, 33), (400, 24))
    problem = draw(Case(shares, head_dim=64, window=window, soft_cap=soft_cap, dtype=dtype))
    output = solve(create_backend("cpu", CPU), problem)
    together = torch.split(output, [new for _, new in shares])
    for seq, expected in enumerate(together):
        alone = solve(create_backend("cpu", CPU), only(problem, seq))
        assert torch.equal(alone, expected), f"sequence {shares[seq]} depends on its neighbours"


@given(st.integers(1, 200_000))
def test_a_length_class_fits_and_wastes_little(seq_len: int) -> None:
    """Padding is less than half of a length, beyond the smallest class."""
    padded = length_class(seq_len)
    assert padded >= seq_len
    assert padded % 32 == 0
    assert padded == 64 or padded < 1.5 * seq_len


def test_length_classes_are_few() -> None:
    """Up to 4,096 tokens there are 13 classes, so most decodes share a call."""
    classes = sorted({length_class(seq_len) for seq_len in range(1, 4097)})
    assert classes == [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]


def test_every_token_is_in_exactly_one_entry_of_the_plan() -> None:
    """Decodes are grouped by class; a chunk of one token counts as a decode."""
    shares = [_share(70, 1), _share(3, 1), _share(90, 1), _share(0, 12), _share(10, 1)]
    plan = plan_step(pack(shares, 16), 16)
    assert [(group.padded_len, group.rows.tolist()) for group in plan.decodes] == [
        (96, [0, 2]),
        (64, [1, 15]),
    ]
    assert [(chunk.start, chunk.end) for chunk in plan.chunks] == [(3, 15)]


def test_padding_points_at_the_sequences_own_first_key() -> None:
    """Slots beyond a sequence's end are its first one, never the trash block's."""
    (group,) = plan_step(pack([Share([0], 2, [5])], 16), 16).decodes
    assert group.key_slots.tolist() == [80, 81, 82, *[80] * 61]
    visible = group.mask(None, torch.float32).flatten() == 0
    assert visible.tolist() == [True] * 3 + [False] * 61


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that an operation returned."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation as it is."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.num_elements = max(self.num_elements, result.numel())
        return result


def test_capped_scores_of_a_long_prompt_are_never_all_in_memory() -> None:
    """However long a prompt is, a few rows' scores are; cut or not they are the same."""
    query, key = torch.randn(300, 8, 4), torch.randn(5000, 2, 4)
    mask = torch.zeros(300, 5000)
    with LargestTensor() as largest:
        output = attend_capped(query, key, key, mask, scale=0.5, soft_cap=5.0)
    assert largest.num_elements <= 2**22 < 256 * 8 * 5000
    last = attend_capped(query[-1:], key, key, mask[-1:], scale=0.5, soft_cap=5.0)
    torch.testing.assert_close(output[-1:], last)


def test_only_a_whole_prompt_uses_the_causal_flag() -> None:
    """A chunk after cached keys, or under a window, has an explicit mask."""
    (whole,) = plan_step(pack([_share(0, 20)], 16), 16).chunks
    (later,) = plan_step(pack([_share(4, 3)], 16), 16).chunks
    assert whole.mask(None, torch.float32) is None
    assert whole.mask(20, torch.float32) is None
    assert whole.mask(19, torch.float32) is not None
    mask = later.mask(None, torch.float32)
    assert mask is not None
    assert (mask == 0).int().tolist() == [
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1],
    ]


def test_a_mask_is_built_once_a_step() -> None:
    """All layers with the same window share one mask."""
    (chunk,) = plan_step(pack([_share(4, 3)], 16), 16).chunks
    assert chunk.mask(5, torch.float32) is chunk.mask(5, torch.float32)
    assert chunk.mask(5, torch.float32) is not chunk.mask(6, torch.float32)


def test_the_best_backend_is_first() -> None:
    """Without a name the CPU gets our kernels where they are, and CUDA one that runs there."""
    kernels = ("native",) if load_kernels().is_loaded else ()
    assert available_backends() == (*kernels, "cpu", "reference")
    assert create_backend(None, CPU).name == available_backends()[0]
    assert create_backend(None, CPU, dtype=torch.float16).name == "cpu"
    assert create_backend(None, torch.device("cuda")).name == "reference"


@pytest.mark.parametrize(("name", "device"), [("flsh", "cpu"), ("cpu", "cuda"), (None, "mps")])
def test_an_unknown_backend_is_refused(name: str | None, device: str) -> None:
    """The error names the backend, the device and what there is instead."""
    with pytest.raises(UnknownBackend, match=rf"{name!r} does not run on '{device}'; available:"):
        create_backend(name, torch.device(device))


def _share(start: int, num_new: int) -> Share:
    return Share([0] * num_new, start, range(1, 2 + (start + num_new) // 16))

"""The flash backends: exactly what flash-attn is given, and what is refused before it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace_worker.attention import (
    AttentionNeed,
    KVCacheSpec,
    UnusableBackend,
    flash_library,
    judge_backends,
)
from headrace_worker.attention.flash import FLASH_2, FLASH_3, Flash2Backend, Flash3Backend
from headrace_worker.attention.flash_library import FlashLibrary
from support import flash_stand_ins
from support.attention_cases import Case, draw, solve
from support.flash_stand_ins import Flash2OnCpu, Flash3OnCpu, as_module

MIXED = ((20, 1), (0, 1), (300, 1), (5, 7), (0, 33), (250, 24))  # decodes, then chunks
CUDA = torch.device("cuda:0")
Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture(autouse=True)
def _forget_what_was_loaded() -> Iterator[None]:
    flash_library._load.cache_clear()
    yield
    flash_library._load.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, library: FlashLibrary, module: ModuleType) -> None:
    """Put a stand-in where the library is looked for."""
    path = library.modules[0]
    if "." in path:
        package = path.partition(".")[0]
        monkeypatch.setitem(sys.modules, package, as_module(package))
    monkeypatch.setitem(sys.modules, path, module)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install both versions' stand-ins."""
    install(monkeypatch, FLASH_2, as_module("f2", flash_stand_ins.flash_attn_varlen_func))
    install(monkeypatch, FLASH_3, as_module("f3", flash_stand_ins.flash_attn_with_kvcache))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pretend that torch sees a GPU; its compute capability is the list's only entry."""
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    return capability


@pytest.mark.parametrize("block_size", [256, 512])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 17},
        {"window": 1},
        {"soft_cap": 0.7},
        {"heads": 9, "kv_heads": 3},
        {"dtype": torch.bfloat16, "head_dim": 80},
    ],
    ids=str,
)
def test_version_2_gets_the_exact_attention(block_size: int, options: dict[str, Any]) -> None:
    """Decodes and chunks go into one varlen call, over blocks of 256 tokens or a multiple."""
    problem = draw(Case(MIXED, block_size=block_size, **options))
    output = solve(Flash2OnCpu(), problem)
    tolerance = 2e-6 if problem.case.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.double(), problem.answer(), atol=tolerance, rtol=tolerance)


def record(
    monkeypatch: pytest.MonkeyPatch, library: FlashLibrary, window: int | None
) -> tuple[Calls, torch.Tensor]:
    """Solve a step of three sequences; return what was passed to flash-attn, and the result."""
    calls: Calls = []
    original = getattr(flash_stand_ins, library.function)

    def recorder(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((args, kwargs))
        result: torch.Tensor = original(*args, **kwargs)
        return result

    recorder.__signature__ = flash_library.inspect.signature(original)  # type: ignore[attr-defined]
    recorder.__name__ = library.function
    monkeypatch.setattr(flash_stand_ins, library.function, recorder)
    backend = Flash2OnCpu() if library is FLASH_2 else Flash3OnCpu()
    case = Case(((20, 1), (5, 7), (0, 3)), block_size=256, window=window, soft_cap=window and 5.0)
    return calls, solve(backend, draw(case))


def test_version_2_is_given_these_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call, pages as views of the cache, prefix sums of both lengths, and nothing more."""
    [(args, kwargs)], output = record(monkeypatch, FLASH_2, None)
    query, key, value = args
    assert query.shape == output.shape == (11, 4, 16)
    assert key.shape == value.shape == (7, 256, 2, 16)
    assert {name: _plain(value) for name, value in kwargs.items()} == {
        "cu_seqlens_q": [0, 1, 8, 11],
        "cu_seqlens_k": [0, 21, 33, 36],
        "max_seqlen_q": 7,
        "max_seqlen_k": 21,
        "softmax_scale": 0.225,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "block_table": kwargs["block_table"].tolist(),
    }
    assert kwargs["block_table"].shape == (3, 1)


def test_version_3_is_given_these_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call, with the lengths as they are; the window counts the tokens before the own one."""
    [(args, kwargs)], output = record(monkeypatch, FLASH_3, 9)
    query, key, value = args
    assert query.shape == output.shape == (11, 4, 16)
    assert key.shape == value.shape == (7, 256, 2, 16)
    assert {name: _plain(value) for name, value in kwargs.items()} == {
        "cache_seqlens": [21, 12, 3],
        "page_table": kwargs["page_table"].tolist(),
        "cu_seqlens_q": [0, 1, 8, 11],
        "max_seqlen_q": 7,
        "softmax_scale": 0.225,
        "causal": True,
        "window_size": (8, 0),
        "softcap": 5.0,
    }


@pytest.mark.parametrize("backend", [Flash2OnCpu, Flash3OnCpu])
def test_the_pages_are_the_cache_itself(backend: type[Flash2OnCpu | Flash3OnCpu]) -> None:
    """What is written after the call before it is seen: no page is a copy."""
    one = backend()
    one.allocate(KVCacheSpec(2, 2, 16, torch.float32, torch.device("cpu"), 256), 3)
    one.cache.key[1][5] = 7.0
    pages = one._pages(1)
    assert pages.key.shape == (3, 256, 2, 16)
    assert pages.key.data_ptr() == one.cache.key[1].data_ptr()
    assert pages.key[0, 5].unique().tolist() == [7.0]


def test_each_version_names_its_block_sizes() -> None:
    """Version 2 pages by multiples of 256 tokens, version 3 as one likes."""
    assert all(size % 256 == 0 for size in Flash2Backend.supported_block_sizes())
    assert {16, 64, 256} < set(Flash3Backend.supported_block_sizes())


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        (torch.bfloat16, 128, None),
        (torch.float16, 256, None),
        (None, None, None),
        (torch.float32, 128, "takes bfloat16 and float16, not float32"),
        (torch.bfloat16, 264, "head_dim of up to 256 in steps of 8, not 264"),
        (torch.bfloat16, 100, "head_dim of up to 256 in steps of 8, not 100"),
    ],
)
@pytest.mark.parametrize("backend", [Flash2Backend, Flash3Backend])
def test_a_model_it_cannot_take_is_refused(
    stand_ins: None,
    gpu: list[tuple[int, int]],
    backend: type[Flash2Backend | Flash3Backend],
    dtype: torch.dtype | None,
    head_dim: int | None,
    reason: str | None,
) -> None:
    """The reason names the dtype or the head size, and what would do."""
    found = backend.obstacle(AttentionNeed(CUDA, dtype, head_dim))
    assert (found is None) if reason is None else (found is not None and reason in found)


@pytest.mark.parametrize(
    ("capability", "version_2", "version_3"),
    [
        ((7, 5), "it needs compute capability 8.0, and cuda:0 has 7.5", "9.0, and cuda:0 has 7.5"),
        ((8, 0), None, "it needs compute capability 9.0, and cuda:0 has 8.0"),
        ((9, 0), None, None),
        ((10, 0), None, "flash-attn 3 has no kernels for compute capability 10.0"),
        ((12, 0), None, "flash-attn 3 has no kernels for compute capability 12.0"),
    ],
)
def test_each_version_runs_on_the_gpus_it_is_built_for(
    stand_ins: None,
    gpu: list[tuple[int, int]],
    capability: tuple[int, int],
    version_2: str | None,
    version_3: str | None,
) -> None:
    """Version 3 is for Hopper, version 2 for Ampere and whatever came after."""
    gpu[0] = capability
    for library, reason in ((FLASH_2, version_2), (FLASH_3, version_3)):
        found = library.obstacle(AttentionNeed(CUDA))
        assert (found is None) if reason is None else (found is not None and reason in found)


def test_a_missing_library_is_named(gpu: list[tuple[int, int]], monkeypatch: Any) -> None:
    """Without flash-attn there is nothing to load."""
    for name in (*FLASH_2.modules, *FLASH_3.modules):
        monkeypatch.setitem(sys.modules, name, None)
    assert FLASH_2.obstacle(AttentionNeed(CUDA)) == "flash-attn 2 is not installed"
    assert FLASH_3.obstacle(AttentionNeed(CUDA)) == "flash-attn 3 is not installed"


def test_a_library_too_old_for_what_is_passed_is_refused(
    gpu: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early releases of version 2 knew no soft cap and no block table."""

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
        max_seqlen_k: Any, softmax_scale: Any = None, causal: Any = False, window_size: Any = None,
    ) -> None: ...  # fmt: skip

    install(monkeypatch, FLASH_2, as_module("old", flash_attn_varlen_func))
    found = FLASH_2.obstacle(AttentionNeed(CUDA))
    assert found == "flash-attn 2 is too old: it has no block_table, softcap"


def test_a_library_built_for_another_torch_is_refused(
    gpu: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """What its import says is the reason."""
    name = FLASH_3.modules[0]
    (tmp_path / f"{name}.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = FLASH_3.obstacle(AttentionNeed(CUDA))
    assert found == "flash-attn 3 does not load: undefined symbol: _ZN3c10"


def test_a_cache_on_the_cpu_is_refused() -> None:
    """Allocating names the device."""
    spec = KVCacheSpec(1, 2, 16, torch.bfloat16, torch.device("cpu"), 256)
    with pytest.raises(UnusableBackend, match="flash-attn 2: it runs on CUDA, not on 'cpu'"):
        Flash2Backend().allocate(spec, 4)


def test_a_block_size_that_it_cannot_page_is_refused() -> None:
    """Version 2 takes no blocks of 16 tokens."""
    spec = KVCacheSpec(1, 2, 16, torch.bfloat16, torch.device("cpu"), 16)
    with pytest.raises(ValueError, match=r"block size 16 is not one of \(256, 512, 1024\)"):
        Flash2OnCpu().allocate(spec, 4)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_titles_tell_two_versions_of_a_backend_apart() -> None:
    """A reader sees which flash-attn is meant, though one name chooses either."""
    verdicts = judge_backends(AttentionNeed(torch.device("cuda")))
    assert [each.name for each in verdicts] == ["flash", "flash", "triton", "reference"]
    assert [each.title for each in verdicts[:2]] == ["flash-attn 3", "flash-attn 2"]
    assert all(each.title == each.name for each in verdicts[2:])

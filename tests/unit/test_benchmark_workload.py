"""The benchmark's workloads: the same requests for ever, and what each of them is about."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest

from benchmarks import workload
from benchmarks.workload import WORKLOADS, Item, bursty, mixed, shared_prefix, single, warm_up


def _digest(items: list[Item]) -> str:
    """Hash all ids and lengths."""
    text = repr([(item.prompt, item.num_output_tokens) for item in items])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("items", "digest"),
    [
        (mixed(), "31039497673f98cb"),
        (shared_prefix(), "4de15595426c472b"),
        (single(), "ec71f35eba7d45ec"),
    ],
    ids=["mixed", "shared", "single"],
)
def test_workloads_never_change(items: list[Item], digest: str) -> None:
    """Figures of years can be compared, because not one token id has changed."""
    assert _digest(items) == digest


def test_the_mixed_workload_has_the_size_that_documents_quote() -> None:
    """256 requests have 38,044 prompt and 22,081 output tokens."""
    items = mixed()
    assert sum(len(item.prompt) for item in items) == 38_044
    assert sum(item.num_output_tokens for item in items) == 22_081


@pytest.mark.parametrize("name", ["mixed", "shared", "single", "long", "bursty"])
def test_a_shorter_workload_is_a_prefix_of_a_longer_one(name: str) -> None:
    """Asking for more requests adds some and changes none."""
    assert WORKLOADS[name](3) == WORKLOADS[name](5)[:3]


def test_shared_prompts_differ_only_behind_the_prefix() -> None:
    """All prompts begin with the same 256 tokens, and no two are equal."""
    items = shared_prefix(8)
    assert len({tuple(item.prompt[:256]) for item in items}) == 1
    assert len({tuple(item.prompt) for item in items}) == 8


def test_the_warm_up_of_shared_prompts_fills_the_prefix_and_nothing_else() -> None:
    """A warm-up has the prefix, and no whole prompt, of what is measured."""
    measured = {tuple(item.prompt) for item in shared_prefix(64)}
    warming = [tuple(item.prompt) for item in warm_up("shared")]
    assert any(prompt[:256] == next(iter(measured))[:256] for prompt in warming)
    assert measured.isdisjoint(warming)


@pytest.mark.parametrize("name", ["mixed", "single", "long", "bursty"])
def test_other_warm_ups_share_nothing_with_what_is_measured(name: str) -> None:
    """Not even the first 16 tokens of a prompt are in a prefix cache when it is measured."""
    starts = {tuple(item.prompt[:16]) for item in WORKLOADS[name](16)}
    assert starts.isdisjoint(tuple(item.prompt[:16]) for item in warm_up(name))


def test_bursts_have_the_rate_asked_for() -> None:
    """Requests arrive in order, at about the mean rate, in gaps of very different lengths."""
    arrivals = [item.arrival_s for item in bursty(512, rate_per_s=4.0, shape=0.5)]
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert arrivals == sorted(arrivals)
    assert 512 / arrivals[-1] == pytest.approx(4.0, rel=0.2)
    assert max(gaps) > 20 * sorted(gaps)[len(gaps) // 4]


def test_a_sweep_has_requests_of_one_size() -> None:
    """Every request of a sweep has the lengths asked for, and a prompt of its own."""
    items = workload.uniform(4, 32, 7)
    assert {(len(item.prompt), item.num_output_tokens) for item in items} == {(32, 7)}
    assert len({tuple(item.prompt) for item in items}) == 4

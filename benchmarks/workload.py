"""The workloads: which prompts arrive when, the same on every machine and in every run.

Lengths are log-normal as in real traffic, token ids are uniform, so that no two prompts share a
prefix by accident. Output lengths are forced, so every system does the same work. Standard library
only: peers read it in environments of their own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

NUM_SHARED_PREFIX_TOKENS = 256
LONG_PROMPT_TOKENS = 2048
_NUM_MIXED = 256  # drawn before the shared prefix, however many of them are asked for
_MIXED_SEED, _ARRIVAL_SEED, _WARM_UP_SEED, _LONG_SEED = range(4)


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a workload."""

    prompt: list[int]  # token ids in [100, 48000)
    num_output_tokens: int  # at least 1, forced
    arrival_s: float = 0.0  # since the workload began

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.prompt) + self.num_output_tokens


def mixed(num_requests: int = _NUM_MIXED) -> list[Item]:
    """Return requests of 16 to 512 prompt and 8 to 256 output tokens, all there at once.

    A shorter workload is a prefix of a longer one.
    """
    source = random.Random(_MIXED_SEED)
    return [_draw_mixed(source) for _ in range(num_requests)]


def shared_prefix(num_requests: int = 256) -> list[Item]:
    """Return requests whose prompts begin with the same 256 tokens and differ in the last 32."""
    source = _after_mixed()
    prefix = _draw_ids(source, NUM_SHARED_PREFIX_TOKENS)
    return [Item(prefix + _draw_ids(source, 32), 64) for _ in range(num_requests)]


def single(num_requests: int = 1) -> list[Item]:
    """Return requests of 128 prompt and 128 output tokens, each to be sent after the last."""
    source = _after_mixed()
    _draw_ids(source, NUM_SHARED_PREFIX_TOKENS + 256 * 32)
    return [Item(_draw_ids(source, 128), 128) for _ in range(num_requests)]


def long_context(num_requests: int = 8) -> list[Item]:
    """Return requests of 2,048 prompt and 64 output tokens."""
    source = random.Random(_LONG_SEED)
    return [Item(_draw_ids(source, LONG_PROMPT_TOKENS), 64) for _ in range(num_requests)]


def bursty(num_requests: int = 64, *, rate_per_s: float = 4.0, shape: float = 0.5) -> list[Item]:
    """Return the mixed requests, arriving at a mean rate with gamma-distributed gaps.

    A shape of 1 is a Poisson process; a smaller one comes in bursts.
    """
    source, now_s, items = random.Random(_ARRIVAL_SEED), 0.0, []
    for item in mixed(num_requests):
        now_s += source.gammavariate(shape, 1 / (shape * rate_per_s))
        items.append(replace(item, arrival_s=now_s))
    return items


def uniform(num_requests: int, num_prompt_tokens: int, num_output_tokens: int) -> list[Item]:
    """Return requests of one size, for a sweep over sizes."""
    source = random.Random(num_prompt_tokens)
    ids = (_draw_ids(source, num_prompt_tokens) for _ in range(num_requests))
    return [Item(prompt, num_output_tokens) for prompt in ids]


def warm_up(name: str) -> list[Item]:
    """Return what to run before a workload: nothing of it is cached, but for a shared prefix."""
    source = random.Random(_WARM_UP_SEED)
    items = [Item(_draw_ids(source, 64 + 32 * index), 16) for index in range(4)]
    if name == "shared":
        prefix = shared_prefix(1)[0].prompt[:NUM_SHARED_PREFIX_TOKENS]
        items.append(Item(prefix + _draw_ids(source, 32), 16))
    return items


WORKLOADS: dict[str, Callable[[int], list[Item]]] = {
    "mixed": mixed,
    "shared": shared_prefix,
    "single": single,
    "bursty": bursty,
    "long": long_context,
}


def _after_mixed() -> random.Random:
    source = random.Random(_MIXED_SEED)
    for _ in range(_NUM_MIXED):
        _draw_mixed(source)
    return source


def _draw_mixed(source: random.Random) -> Item:
    num_prompt_tokens = _log_normal(source, median=118, sigma=0.72, low=16, high=512)
    num_output_tokens = _log_normal(source, median=68, sigma=0.80, low=8, high=256)
    return Item(_draw_ids(source, num_prompt_tokens), num_output_tokens)


def _log_normal(source: random.Random, *, median: float, sigma: float, low: int, high: int) -> int:
    drawn = round(math.exp(source.gauss(math.log(median), sigma)))
    return max(low, min(high, drawn))


def _draw_ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(100, 48_000) for _ in range(count)]

"""The mixed workload: skewed prompt and output lengths, the same on every machine."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a workload."""

    prompt: list[int]  # token ids, 16..512 of them
    num_output_tokens: int  # 8..256, forced


def mixed(num_requests: int) -> list[Item]:
    """Return the first requests of the workload; lengths are log-normal, ids are uniform.

    A shorter workload is a prefix of a longer one.
    """
    source = random.Random(0)
    return [_item(source) for _ in range(num_requests)]


def _item(source: random.Random) -> Item:
    num_prompt_tokens = _log_normal(source, median=118, sigma=0.72, low=16, high=512)
    num_output_tokens = _log_normal(source, median=68, sigma=0.80, low=8, high=256)
    prompt = [source.randrange(100, 48_000) for _ in range(num_prompt_tokens)]
    return Item(prompt, num_output_tokens)


def _log_normal(source: random.Random, *, median: float, sigma: float, low: int, high: int) -> int:
    drawn = round(math.exp(source.gauss(math.log(median), sigma)))
    return max(low, min(high, drawn))

"""What a run of the GPU benchmark is told, and how large things are on a GPU and at toy size."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.workload import Item

Share = tuple[int, int]
"""Of one sequence in a step: (tokens already cached, new tokens)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, and how much of it."""

    copy_bytes: int  # of the copy that the memory's rate is taken from
    product_size: int  # rows and columns of both matrices of the product
    measure_s: float  # seconds that one figure is measured for, the median of many runs
    least_cache_bytes: int  # that a measured step reads, so that no cache of the GPU holds it
    decodes: tuple[tuple[int, int], ...]  # (sequences, tokens of each)
    prefills: tuple[tuple[Share, ...], ...]
    num_requests: int
    lengths: tuple[int, int]  # least and most tokens of a prompt, and of an output
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # tokens, prompt and output together
    steady_prompt_tokens: int  # of each sequence in the steps that are timed one by one
    kv_cache_bytes: int | None  # None: all that is left


FULL = Sizes(
    copy_bytes=1 << 32,
    product_size=8192,
    measure_s=0.3,
    least_cache_bytes=1 << 28,
    decodes=((1, 1024), (1, 32_768), (32, 2048), (256, 1024)),
    prefills=(((0, 2048),), ((0, 8192),), ((8192, 512),), ((0, 1024),) * 8),
    num_requests=256,
    lengths=(100, 1024),
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=4096,
    steady_prompt_tokens=512,
    kv_cache_bytes=None,
)
TINY = Sizes(
    copy_bytes=1 << 20,
    product_size=64,
    measure_s=0.0,
    least_cache_bytes=1 << 10,
    decodes=((2, 10),),
    prefills=(((8, 6), (0, 4)),),
    num_requests=4,
    lengths=(4, 8),
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=512,
    steady_prompt_tokens=8,
    kv_cache_bytes=1 << 20,
)


@dataclass(frozen=True, slots=True)
class Setup:
    """One run; it travels to each part's process as JSON."""

    device: str  # as torch writes it
    is_tiny: bool  # every part, at a size at which figures mean nothing
    part_s: float  # seconds that a part may go on measuring
    folder: str  # where parts leave models for each other

    @property
    def sizes(self) -> Sizes:
        """How much of everything."""
        return TINY if self.is_tiny else FULL

    def write(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Setup:
        """Return what ``write`` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**values)

    def model_folder(self, name: str) -> Path:
        """Return where a model lies, once it is made."""
        return Path(self.folder) / name


def requests(sizes: Sizes) -> list[Item]:
    """Return the yardstick of small engines: prompt and output lengths uniform in one range."""
    source = random.Random(0)
    highest_id = 500 if sizes is TINY else 48_000
    return [
        Item(
            [source.randrange(100, highest_id) for _ in range(source.randint(*sizes.lengths))],
            source.randint(*sizes.lengths),
        )
        for _ in range(sizes.num_requests)
    ]

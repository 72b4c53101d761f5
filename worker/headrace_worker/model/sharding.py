"""Which part of a model one rank holds: fewer heads, a narrower feed-forward, some of the words.

Query, key, value, gate and up are cut by outputs, the products after them by inputs, so that what
lies between stays on its rank and each pair ends in one sum. Embedding and head are cut by words.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from headrace_worker.model.config import ModelConfig
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.ranks import Ranks, num_words_of
from headrace_worker.model.weights import CuttableSource


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return what one of ``size`` ranks computes of a model; the vocabulary stays the whole one.

    With fewer KV heads than ranks, several ranks hold the same one.

    Raises:
        ModelLoadError: the model cannot be cut into so many equal parts; the message names why.
    """
    _check_divides("attention heads", config.num_heads, size)
    _check_divides("intermediate_size", config.intermediate_size, size)
    if size % config.num_kv_heads:
        _check_divides("KV heads", config.num_kv_heads, size)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
    )


class ShardedSource:
    """A checkpoint as one rank sees it: all names, but of each tensor only the rank's part."""

    def __init__(self, whole: CuttableSource, config: ModelConfig, ranks: Ranks) -> None:
        self._whole = whole
        self._cuts = _cuts_of(config, ranks)
        self._is_first = ranks.is_first
        self._num_words = num_words_of(ranks, config.vocab_size)  # rows, padding included

    def names(self) -> Collection[str]:
        """Return the names of the whole checkpoint."""
        return self._whole.names()

    def read(self, name: str) -> torch.Tensor:
        """Return the rank's part of one tensor, in the dtype it is stored in.

        Raises:
            ModelLoadError: the whole tensor has not the shape that the configuration says.
        """
        *_, owner, kind = name.rsplit(".", 2)
        cut = self._cuts.get(owner)
        if cut is None:
            return self._whole.read(name)
        if kind == "bias" and cut.axis == 1:
            bias = self._whole.read(name)
            return bias if self._is_first else torch.zeros_like(bias)  # it is added once
        return self._read_part(name, cut)

    def _read_part(self, name: str, cut: _Cut) -> torch.Tensor:
        shape = self._whole.shape(name)
        if cut.axis >= len(shape) or shape[cut.axis] != cut.whole_size:
            raise ModelLoadError(
                f"{name} has shape {shape}; the configuration says {cut.whole_size} in place"
                f" {cut.axis}"
            )
        part = self._whole.read_parts(name, cut.axis, cut.parts)
        if not cut.is_padded:
            return part
        padded = part.new_zeros(self._num_words, *part.shape[1:])
        padded[: len(part)] = part
        return padded


@dataclass(frozen=True, slots=True)
class _Cut:
    """What to take of a tensor."""

    axis: int  # 0: outputs, 1: inputs
    whole_size: int  # along the axis
    parts: tuple[range, ...]  # along the axis, joined in this order
    is_padded: bool = False  # with zeros, up to as many words as the first rank has


def _cuts_of(config: ModelConfig, ranks: Ranks) -> dict[str, _Cut]:
    """Name the modules that are cut; all others are whole on each rank."""
    head = config.head_dim
    query = _even_part(config.num_heads, ranks)
    first_kv = ranks.rank * config.num_kv_heads // ranks.size
    kv = range(first_kv, first_kv + max(1, config.num_kv_heads // ranks.size))
    inner = _even_part(config.intermediate_size, ranks)
    num_rows = (config.num_heads * head, config.num_kv_heads * head, config.num_kv_heads * head)
    rows = (_scaled(query, head), _scaled(kv, head), _scaled(kv, head))
    words = _Cut(0, config.vocab_size, (_words(config.vocab_size, ranks),), is_padded=True)
    return {
        "q_proj": _Cut(0, num_rows[0], rows[:1]),
        "k_proj": _Cut(0, num_rows[1], rows[1:2]),
        "v_proj": _Cut(0, num_rows[2], rows[2:]),
        "qkv_proj": _joined(num_rows, rows),
        "o_proj": _Cut(1, num_rows[0], rows[:1]),
        "gate_proj": _Cut(0, config.intermediate_size, (inner,)),
        "up_proj": _Cut(0, config.intermediate_size, (inner,)),
        "gate_up_proj": _joined((config.intermediate_size,) * 2, (inner, inner)),
        "down_proj": _Cut(1, config.intermediate_size, (inner,)),
        "embed_tokens": words,
        "lm_head": words,
    }


def _joined(whole_sizes: tuple[int, ...], parts: tuple[range, ...]) -> _Cut:
    """Cut several projections that are stored as one, end to end."""
    start, moved = 0, []
    for size, part in zip(whole_sizes, parts, strict=True):
        moved.append(range(start + part.start, start + part.stop))
        start += size
    return _Cut(0, start, tuple(moved))


def _words(vocab_size: int, ranks: Ranks) -> range:
    """Return a rank's token ids: on the last ranks they may be few, or none."""
    width = num_words_of(ranks, vocab_size)
    start = ranks.rank * width
    return range(min(start, vocab_size), min(start + width, vocab_size))


def _even_part(total: int, ranks: Ranks) -> range:
    width = total // ranks.size
    return range(ranks.rank * width, (ranks.rank + 1) * width)


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _check_divides(what: str, count: int, size: int) -> None:
    if count % size:
        raise ModelLoadError(f"tensor_parallel_size {size} does not divide {count} {what}")

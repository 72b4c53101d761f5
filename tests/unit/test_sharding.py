"""Which part of the weights a rank reads, and which models are refused for a number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_worker.model import ModelLoadError, load_model
from headrace_worker.model.config import read_config
from headrace_worker.model.ranks import ALONE, Ranks
from headrace_worker.model.safetensors_reader import SafetensorsReader
from headrace_worker.model.sharding import ShardedSource, shard_config
from headrace_worker.model.weights import CuttableSource
from support.model_configs import read
from support.ranks import on_ranks
from support.tiny_models import make_tiny_llama, make_tiny_model

CPU = torch.device("cpu")
ATTENTION = "model.layers.0.self_attn"


class ReadLog(SafetensorsReader):
    """A checkpoint that remembers how many values were read of each tensor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.num_values: dict[str, int] = {}

    def read(self, name: str) -> torch.Tensor:
        return self._noted(name, super().read(name))

    def read_parts(self, name: str, axis: int, parts: Any) -> torch.Tensor:
        return self._noted(name, super().read_parts(name, axis, parts))

    def _noted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.num_values[name] = tensor.numel()
        return tensor


def rank(number: int, size: int) -> Ranks:
    """Return a rank that never meets the others."""
    return Ranks(number, size, None)


def shards(folder: Path, size: int) -> list[CuttableSource]:
    """Return a folder's checkpoint as each rank sees it."""
    config, reader = read_config(folder), SafetensorsReader(folder)
    return [ShardedSource(reader, config, rank(number, size)) for number in range(size)]


def test_outputs_are_cut_by_rows_and_inputs_by_columns(tmp_path: Path) -> None:
    """End to end, the parts of all ranks are the tensor."""
    make_tiny_llama(tmp_path)
    whole, parts = load_file(tmp_path / "model.safetensors"), shards(tmp_path, 2)
    for name, axis in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
        full = f"{ATTENTION}.{name}.weight"
        assert torch.equal(torch.cat([one.read(full) for one in parts], axis), whole[full])


def test_ranks_beyond_the_kv_heads_read_the_same_one(tmp_path: Path) -> None:
    """Of four ranks, two share each of two heads."""
    make_tiny_llama(tmp_path)
    name = f"{ATTENTION}.k_proj.weight"
    first, second, third, fourth = (one.read(name) for one in shards(tmp_path, 4))
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert torch.equal(torch.cat((first, third)), load_file(tmp_path / "model.safetensors")[name])


def test_a_fused_projection_is_cut_within_each_of_its_parts(tmp_path: Path) -> None:
    """Phi-3 stores query, key and value as one tensor; a rank takes heads of all three."""
    make_tiny_model(tmp_path, "phi3")
    name = f"{ATTENTION}.qkv_proj.weight"
    query, key, value = load_file(tmp_path / "model.safetensors")[name].split((64, 32, 32))
    wanted = torch.cat((query[32:], key[16:], value[16:]))
    assert torch.equal(shards(tmp_path, 2)[1].read(name), wanted)


def test_the_bias_after_a_sum_is_the_first_ranks_alone(tmp_path: Path) -> None:
    """The others add nothing, so that it is added once."""
    make_tiny_llama(tmp_path, attention_bias=True)
    first, second = (one.read(f"{ATTENTION}.o_proj.bias") for one in shards(tmp_path, 2))
    assert first.any()
    assert not second.any()


def test_a_rank_reads_nothing_but_its_part(tmp_path: Path) -> None:
    """Of all that is cut, half the values are read; norms are read whole."""
    make_tiny_llama(tmp_path)
    log = ReadLog(tmp_path)
    source = ShardedSource(log, read_config(tmp_path), rank(1, 2))
    whole = load_file(tmp_path / "model.safetensors")
    for name in whole:
        source.read(name)
        share = 1 if "norm" in name else 2
        assert log.num_values[name] * share == whole[name].numel(), name


def test_each_rank_holds_its_share_of_the_weights(tmp_path: Path) -> None:
    """Two ranks take half the memory each, but for norms and the table of rotations."""
    make_tiny_llama(tmp_path, hidden=128)

    def weights_bytes(ranks: Ranks) -> int:
        return load_model(tmp_path, dtype=torch.float32, device=CPU, ranks=ranks).weights_bytes

    whole, first, second = weights_bytes(ALONE), *on_ranks(2, weights_bytes)
    norms_and_tables = 2 * first - whole
    assert first == second
    assert norms_and_tables == 5 * 128 * 4 + 2 * 512 * 16 * 4


def widen(tensors: dict[str, torch.Tensor], name: str) -> None:
    """Give a tensor more rows than the configuration has."""
    tensors[name] = torch.cat((tensors[name], tensors[name]))


@pytest.mark.parametrize("name", [f"{ATTENTION}.q_proj.weight", "model.embed_tokens.weight"])
def test_a_tensor_of_another_size_is_refused_though_its_part_would_fit(
    tmp_path: Path, name: str
) -> None:
    """The shape of the whole counts."""
    make_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    widen(tensors, name)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"{name} has shape .*; the configuration says"):
        shards(tmp_path, 2)[0].read(name)


@pytest.mark.parametrize(
    ("size", "changes", "reason"),
    [
        (3, {}, "3 does not divide 4 attention heads"),
        (4, {"intermediate_size": 130}, "4 does not divide 130 intermediate_size"),
        (
            4,
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            "4 does not divide 3 KV heads",
        ),
        (
            2,
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
            "2 does not divide 3 KV heads",
        ),
    ],
)
def test_what_cannot_be_cut_evenly_is_refused_by_name(
    tmp_path: Path, size: int, changes: dict[str, Any], reason: str
) -> None:
    """The message has the setting, its value and the number in its way."""
    config = read(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=f"tensor_parallel_size {reason}"):
        shard_config(config, size)


@pytest.mark.parametrize(
    ("size", "expected"), [(1, (8, 4, 128)), (2, (4, 2, 64)), (4, (2, 1, 32)), (8, (1, 1, 16))]
)
def test_heads_are_split_and_kv_heads_never_fewer_than_one(
    tmp_path: Path, size: int, expected: tuple[int, int, int]
) -> None:
    """Eight heads over four KV heads, on up to eight ranks."""
    config = read(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    part = shard_config(config, size)
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == expected
    assert (part.vocab_size, part.hidden_size) == (config.vocab_size, config.hidden_size)


def test_a_model_of_transformers_own_is_refused(tmp_path: Path) -> None:
    """Its layers are not ours to cut."""
    make_tiny_model(tmp_path, "olmo2")
    with pytest.raises(ModelLoadError, match="tensor_parallel_size 2 is for model_impl 'native'"):
        load_model(tmp_path, dtype=torch.float32, device=CPU, ranks=rank(0, 2))


Collective = Callable[[Ranks, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    "collective", [Ranks.sum, Ranks.gather_columns, Ranks.share], ids=lambda one: one.__name__
)
def test_alone_a_collective_returns_what_it_is_given(collective: Collective) -> None:
    """One rank pays nothing."""
    x = torch.ones(2, 3)
    assert collective(ALONE, x) is x


def test_ranks_sum_gather_share_and_find_the_least() -> None:
    """Two ranks with a row each."""

    def work(ranks: Ranks) -> tuple[list[float], list[list[float]], list[float], int]:
        row = torch.tensor([1.0, 2.0]) * 10**ranks.rank
        return (
            ranks.sum(row.clone()).tolist(),
            ranks.gather_columns(row.unsqueeze(0)).tolist(),
            ranks.share(row.clone()).tolist(),
            ranks.least(7 - ranks.rank, CPU),
        )

    first, second = on_ranks(2, work)
    assert first == ([11.0, 22.0], [[1.0, 2.0, 10.0, 20.0]], [1.0, 2.0], 6)
    assert second == ([11.0, 22.0], [[10.0, 20.0]], [1.0, 2.0], 6)

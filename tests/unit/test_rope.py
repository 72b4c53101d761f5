"""Rotary positions: frequencies and rotation are transformers' own, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as rotate_phi3

from headrace_worker.model import ModelLoadError
from headrace_worker.model.families import FAMILIES
from headrace_worker.model.rope import RopeSpec, RotaryTable, longest_sequence, resolve_rope, rotate

LLAMA = FAMILIES["llama"]
CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    LLAMA3,
    YARN,
    {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    {**YARN, "truncate": False},
    {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * index for index in range(8)],
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 256,
        "factor": 4.0,
    },
]


def config_with(**fields: Any) -> LlamaConfig:
    """Return a configuration with heads of 16 and up to 256 positions."""
    return LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, **fields)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "-".join(map(str, scaling)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tables_equal_transformers(scaling: dict[str, Any], dtype: torch.dtype) -> None:
    """cos and sin of every position have the bits that transformers computes."""
    config = config_with(rope_parameters={"rope_theta": 5000.0, **scaling})
    positions = torch.arange(256)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions[None])
    table = RotaryTable(resolve_rope(config, 16, LLAMA), 256, dtype, CPU)
    our_cos, signed_sin = table.lookup(positions)
    assert torch.equal(our_cos[:, 0], cos[0])
    assert torch.equal(signed_sin[:, 0, 8:], sin[0, :, 8:])
    assert torch.equal(signed_sin[:, 0, :8], -sin[0, :, :8])


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "-".join(map(str, scaling)))
def test_old_and_new_fields_mean_the_same(scaling: dict[str, Any]) -> None:
    """rope_theta with rope_scaling resolves to what rope_parameters does (B43)."""
    new = config_with(rope_parameters={"rope_theta": 5000.0, **scaling})
    old = config_with(rope_theta=5000.0, rope_scaling=dict(scaling))
    spec = resolve_rope(old, 16, LLAMA)
    assert spec == resolve_rope(new, 16, LLAMA)
    assert spec.rope_type == scaling["rope_type"]


def test_the_oldest_spelling_is_read() -> None:
    """Files that say "type" instead of "rope_type" get their scaling, not the default."""
    old = config_with(rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert resolve_rope(old, 16, LLAMA).inv_freq[0] == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_equals_transformers(dtype: torch.dtype) -> None:
    """Rotated queries and keys have transformers' bits, in any number of heads."""
    torch.manual_seed(0)
    query, key = torch.randn(9, 4, 16).to(dtype), torch.randn(9, 2, 16).to(dtype)
    positions = torch.randint(0, 256, (9,))
    config = config_with()
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    expected = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin
    )
    rotation = RotaryTable(resolve_rope(config, 16, LLAMA), 256, dtype, CPU).lookup(positions)
    assert torch.equal(rotate(query, rotation), expected[0][0].transpose(0, 1))
    assert torch.equal(rotate(key, rotation), expected[1][0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_partial_rotation_equals_transformers(dtype: torch.dtype) -> None:
    """Phi rotates the first part of a head and leaves the rest as it is, bit for bit."""
    torch.manual_seed(0)
    make_config: Any = Phi3Config  # the field is not in its signature
    config = make_config(
        hidden_size=64, num_attention_heads=4, partial_rotary_factor=0.75, pad_token_id=0
    )
    x = torch.randn(9, 4, 16).to(dtype)
    positions = torch.randint(0, 256, (9,))
    cos, sin = Phi3RotaryEmbedding(config)(x, positions[None])
    theirs: Any = rotate_phi3  # transformers leaves it untyped
    heads_first = x.transpose(0, 1)[None]
    expected, _ = theirs(heads_first, heads_first, cos, sin)
    spec = resolve_rope(config, 16, FAMILIES["phi3"])
    rotated = rotate(x, RotaryTable(spec, 256, dtype, CPU).lookup(positions))
    assert torch.equal(rotated, expected[0].transpose(0, 1))
    assert torch.equal(rotated[..., 12:], x[..., 12:])


def test_position_zero_rotates_nothing() -> None:
    """The first token's vectors stay as they are, and all keep their length."""
    table = RotaryTable(resolve_rope(config_with(), 16, LLAMA), 256, torch.float32, CPU)
    x = torch.randn(2, 3, 16)
    rotated = rotate(x, table.lookup(torch.tensor([0, 200])))
    assert torch.equal(rotated[0], x[0])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(rotated[1], x[1])


@pytest.mark.parametrize("rope_type", ["proportional", "axial", "magic"])
def test_other_rope_types_are_refused(rope_type: str) -> None:
    """A type that would need other arithmetic is refused by name, never run as default."""
    config = config_with()
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelLoadError, match=f"rope type '{rope_type}' is not supported"):
        resolve_rope(config, 16, LLAMA)


def test_a_missing_parameter_is_refused() -> None:
    """A scaling without its factor names the type and what was given."""
    config = config_with()
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4}
    with pytest.raises(ModelLoadError, match="rope type 'linear': bad parameters"):
        resolve_rope(config, 16, LLAMA)


def test_every_layer_must_place_a_token() -> None:
    """The longest sequence is the one that no layer's frequencies forbid."""
    near, far = (
        RopeSpec("longrope", (1.0,), exact_positions=100),
        RopeSpec("yarn", (1.0,), 1.0, 400),
    )
    assert longest_sequence([far, None], 200) == 400
    assert longest_sequence([far, near], 200) == 100


def test_yarn_extends_the_context() -> None:
    """A yarn model takes factor times its original length, whatever the configuration states."""
    spec = resolve_rope(config_with(rope_parameters={"rope_theta": 1e4, **YARN}), 16, LLAMA)
    assert longest_sequence([spec], 64) == 256
    assert longest_sequence([spec], 512) == 512
    assert longest_sequence([RopeSpec("default", (1.0,)), None], 64) == 64

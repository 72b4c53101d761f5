"""Rotary positions (Su et al., 2021; YaRN: Peng et al., 2023), frequencies as in transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace_worker.model.errors import ModelLoadError

# "dynamic" changes frequencies only beyond max_position_embeddings, where no sequence ever gets.
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The frequencies of a model, resolved once; a rope type is nothing but these."""

    rope_type: str  # one of the supported types
    inv_freq: tuple[float, ...]  # [head_dim / 2], radians per position, float32 values
    attention_scaling: float = 1.0  # multiplies cos and sin (yarn)
    extended_positions: int | None = None  # positions that yarn stretches to, where it is used

    def extend(self, max_position_embeddings: int) -> int:
        """Return the longest sequence in tokens, given the number the configuration states."""
        return max(max_position_embeddings, self.extended_positions or 0)


def resolve_rope(hf_config: Any, head_dim: int) -> RopeSpec:
    """Compute the frequencies from ``rope_parameters`` (transformers moves older fields there).

    Raises:
        ModelLoadError: the rope type or a parameter is not supported, or one is missing.
    """
    parameters = hf_config.rope_parameters or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise ModelLoadError(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(_ROPE_TYPES)}"
        )
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelLoadError(
            f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported, only 1"
        )
    if head_dim % 2:
        raise ModelLoadError(f"head_dim {head_dim} is odd; a rotation needs pairs")
    try:
        if rope_type == "default":
            frequencies, scaling = _default_frequencies(parameters["rope_theta"], head_dim), 1.0
        else:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](hf_config, None)
        extended = _extended(rope_type, parameters)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"rope type {rope_type!r}: bad parameters {parameters}") from error
    return RopeSpec(rope_type, tuple(frequencies.tolist()), float(scaling), extended)


class RotaryTable:
    """cos and sin of every position, so that a position gets the same bits in every batch."""

    def __init__(
        self, spec: RopeSpec, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=device)
        positions = torch.arange(num_positions, dtype=torch.float32, device=device)
        angles = positions[:, None] * inv_freq
        cos = angles.cos() * spec.attention_scaling
        sin = angles.sin() * spec.attention_scaling
        # [num_positions, head_dim]; the first half of sin carries the minus of the rotation
        self.cos = torch.cat((cos, cos), dim=-1).to(dtype)
        self.signed_sin = torch.cat((-sin, sin), dim=-1).to(dtype)

    def lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin, each ``[num_tokens, 1, head_dim]``, for ``rotate``."""
        return self.cos[positions, None], self.signed_sin[positions, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[num_tokens, heads, head_dim]``; dimension i pairs with i + head_dim / 2."""
    partners = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).add_(partners.mul_(signed_sin))


def _default_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.as_tensor(1.0 / (theta**exponents))


def _extended(rope_type: str, parameters: dict[str, Any]) -> int | None:
    """Models stretched by yarn often keep the original length in their configuration."""
    if rope_type != "yarn":
        return None
    return int(parameters["factor"] * parameters["original_max_position_embeddings"])

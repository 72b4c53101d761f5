"""Rotary positions (Su et al., 2021; YaRN: Peng et al., 2023), frequencies as in transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.families import Family

# By the type that first needs them; what a type has no use for is ignored, as in transformers.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": ("rope_theta", "rope_type", "type", "partial_rotary_factor"),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("short_factor", "long_factor"),
}
_PARAMETER_NAMES = frozenset(name for names in _PARAMETERS.values() for name in names)

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and signed sin, each [num_tokens, 1, rotary_dim]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The frequencies of a layer, resolved once; a rope type is nothing but these."""

    rope_type: str  # one of the supported types
    inv_freq: tuple[float, ...]  # [rotary_dim / 2], radians per position, float32 values
    attention_scaling: float = 1.0  # multiplies cos and sin (yarn, longrope)
    extended_positions: int | None = None  # positions that yarn stretches to, where it is used
    exact_positions: int | None = None  # beyond them other frequencies hold, for the whole text


def resolve_ropes(hf_config: Any, head_dim: int, family: Family) -> tuple[RopeSpec | None, ...]:
    """Compute each layer's frequencies from ``rope_parameters``; ``None`` for one without rope.

    transformers has moved the older fields ``rope_theta`` and ``rope_scaling`` there.

    Raises:
        ModelLoadError: the rope type or a parameter is not supported, or one is missing.
    """
    parameters = hf_config.rope_parameters or {}
    num_layers = hf_config.num_hidden_layers
    if family.rope_by_layer_type:
        by_type = {
            layer_type: _resolve(
                hf_config, parameters.get(layer_type) or {}, head_dim, family, layer_type
            )
            for layer_type in dict.fromkeys(hf_config.layer_types)
        }
        _check_names(parameters, ("full_attention", "sliding_attention"))
        return tuple(by_type[layer_type] for layer_type in hf_config.layer_types)
    spec = resolve_rope(hf_config, head_dim, family)
    is_rotated = getattr(hf_config, "no_rope_layers", None) or [1] * num_layers
    if len(is_rotated) < num_layers:
        raise ModelLoadError(f"no_rope_layers has {len(is_rotated)} entries, not {num_layers}")
    return tuple(spec if flag else None for flag in is_rotated[:num_layers])


def resolve_rope(hf_config: Any, head_dim: int, family: Family) -> RopeSpec:
    """Compute the frequencies that all layers share.

    Raises:
        ModelLoadError: as for ``resolve_ropes``.
    """
    return _resolve(hf_config, hf_config.rope_parameters or {}, head_dim, family, None)


def longest_sequence(ropes: Iterable[RopeSpec | None], max_position_embeddings: int) -> int:
    """Return the longest sequence in tokens that every layer can place."""
    specs = [rope for rope in ropes if rope is not None]
    longest = max([max_position_embeddings, *(spec.extended_positions or 0 for spec in specs)])
    return min([longest, *(spec.exact_positions or longest for spec in specs)])


class RotaryTable:
    """cos and sin of every position, so that a position gets the same bits in every batch."""

    def __init__(
        self, spec: RopeSpec, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=device)
        positions = torch.arange(num_positions, dtype=torch.float32, device=device)
        angles = positions[:, None] * inv_freq
        self._cos = (angles.cos() * spec.attention_scaling).to(dtype)  # [num_positions, dim / 2]
        self._sin = (angles.sin() * spec.attention_scaling).to(dtype)  # the same shape

    def lookup(self, positions: torch.Tensor) -> Rotation:
        """Return what ``rotate`` needs: both halves of a head turn by the same angles.

        The first half of sin carries the minus of the rotation.
        """
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self._cos.nbytes + self._sin.nbytes


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate ``[num_tokens, heads, head_dim]``; dimension i pairs with i + rotary_dim / 2.

    Dimensions from rotary_dim on stay as they are.
    """
    cos, signed_sin = rotation
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], rotation), x[..., rotary_dim:]), dim=-1)
    partners = x.roll(rotary_dim // 2, dims=-1)
    return (x * cos).add_(partners.mul_(signed_sin))


def _resolve(
    hf_config: Any,
    parameters: dict[str, Any],
    head_dim: int,
    family: Family,
    layer_type: str | None,
) -> RopeSpec:
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _PARAMETERS:
        raise ModelLoadError(
            f"rope type {rope_type!r} is not supported; supported: {', '.join(_PARAMETERS)}"
        )
    _check_names(parameters, _PARAMETER_NAMES)
    partial = parameters.get("partial_rotary_factor")
    if not family.partial_rotary and partial not in (None, 1):
        raise ModelLoadError(f"partial_rotary_factor {partial} is not supported, only 1")
    if head_dim % 2:
        raise ModelLoadError(f"head_dim {head_dim} is odd; a rotation needs pairs")
    try:
        frequencies, scaling = _frequencies(hf_config, parameters, head_dim, layer_type)
        extended = exact = None
        if rope_type == "yarn":  # the configuration often keeps the length before the stretching
            extended = int(parameters["factor"] * parameters["original_max_position_embeddings"])
        elif rope_type == "longrope":
            exact = int(parameters["original_max_position_embeddings"])
        elif rope_type == "dynamic":
            exact = hf_config.max_position_embeddings
    except (KeyError, TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise ModelLoadError(f"rope type {rope_type!r}: bad parameters {parameters}") from error
    return RopeSpec(rope_type, tuple(frequencies.tolist()), float(scaling), extended, exact)


def _frequencies(
    hf_config: Any, parameters: dict[str, Any], head_dim: int, layer_type: str | None
) -> tuple[torch.Tensor, float]:
    rope_type = parameters.get("rope_type", "default")
    if rope_type != "default":
        for_layers = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](hf_config, None, **for_layers)
        return frequencies, scaling
    rotary_dim = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return torch.as_tensor(1.0 / (parameters["rope_theta"] ** exponents)), 1.0


def _check_names(parameters: dict[str, Any], known: Iterable[str]) -> None:
    for name, value in parameters.items():
        if name not in known and value is not None:
            raise ModelLoadError(f"rope parameter {name!r} ({value!r}) is not supported here")

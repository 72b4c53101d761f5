"""One layer of the decoder: attention and feed-forward, every choice read from the config."""

from __future__ import annotations

import torch

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.model.config import ModelConfig
from headrace_worker.model.gated_linear import GatedLinear
from headrace_worker.model.kv_place import KVPlace
from headrace_worker.model.linear import Linear, empty_linear
from headrace_worker.model.norm import Norm
from headrace_worker.model.ranks import ALONE, Ranks
from headrace_worker.model.rope import Rotation
from headrace_worker.model.row_ops import TORCH_ROW_OPS, RowOps


class DecoderLayer:
    """Attention and feed-forward of one layer, with query, key, value and gate, up fused."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config  # of this rank's part
        self.ranks = ranks
        self.index = index
        hidden, inner = config.hidden_size, config.intermediate_size
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim

        def linear(in_features: int, out_features: int, bias: bool) -> Linear:
            return empty_linear(in_features, out_features, bias, dtype, device)

        def norm(size: int) -> Norm:
            return empty_norm(size, config, dtype, device)

        self.input_norm = norm(hidden)
        self.qkv = linear(hidden, (heads + 2 * kv_heads) * head_dim, config.qkv_bias)
        self.query_norm = norm(head_dim) if config.qk_norm else None
        self.key_norm = norm(head_dim) if config.qk_norm else None
        self.output = linear(heads * head_dim, hidden, config.output_bias)
        self.attention_post_norm = norm(hidden) if config.post_norms else None
        self.feed_forward_norm = norm(hidden)
        gate_up = linear(hidden, 2 * inner, config.mlp_bias)
        self.gate_up = GatedLinear(gate_up.weight, gate_up.bias, activation=config.activation)
        self.down = linear(inner, hidden, config.mlp_bias)
        self.feed_forward_post_norm = norm(hidden) if config.post_norms else None
        self.row_ops: RowOps = TORCH_ROW_OPS

    def forward(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size], updated in place
        delta: torch.Tensor | None,  # the same shape: what the layer before leaves to add
        rotation: Rotation | None,  # None: this layer does not rotate
        batch: PackedBatch,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """Add this layer's attention to ``hidden``; return what its feed-forward adds.

        Whoever normalizes next adds it, since that is one pass over the rows for both.
        """
        ops = self.row_ops
        normed = ops.add_norm(hidden, delta, self.input_norm)
        attended = self.ranks.sum(self._attend(normed, rotation, batch, backend))
        if self.attention_post_norm is not None:
            attended = ops.norm(attended, self.attention_post_norm)
        normed = ops.add_norm(hidden, attended, self.feed_forward_norm)
        fed = self.ranks.sum(self.down(self.gate_up.gated(normed, ops)))
        if self.feed_forward_post_norm is not None:
            fed = ops.norm(fed, self.feed_forward_post_norm)
        return fed

    def _attend(
        self,
        normed: torch.Tensor,  # [num_tokens, hidden_size]
        rotation: Rotation | None,
        batch: PackedBatch,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        config = self.config
        num_tokens, heads, kv_heads = normed.shape[0], config.num_heads, config.num_kv_heads
        fused = self.qkv(normed).view(num_tokens, heads + 2 * kv_heads, config.head_dim)
        query_key, value = fused[:, : heads + kv_heads], fused[:, heads + kv_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = query_key[:, :heads], query_key[:, heads:]
            norm = self.row_ops.norm
            query_key = torch.cat((norm(query, self.query_norm), norm(key, self.key_norm)), dim=1)
        if rotation is None:
            backend.write_kv(self.index, query_key[:, heads:], value, batch)
            query = query_key[:, :heads]
        else:
            place = KVPlace(self.index, batch, backend)
            query = self.row_ops.rotate_and_write(query_key, value, rotation, place)
        attended = backend.attend(
            query,
            self.index,
            batch,
            scale=config.attention_scale,
            window=config.windows[self.index],
            soft_cap=config.attention_soft_cap,
        )
        return self.output(attended.reshape(num_tokens, heads * config.head_dim))

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layer's projections."""
        return self.qkv, self.output, self.gate_up, self.down

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return where each tensor of the layer goes, by transformers' name within the layer."""
        config = self.config
        kv_size = config.num_kv_heads * config.head_dim
        heads = {"q": config.num_heads * config.head_dim, "k": kv_size, "v": kv_size}
        inner = {"gate": config.intermediate_size, "up": config.intermediate_size}
        if config.fused_projections:
            heads = {"qkv": sum(heads.values())}
            inner = {"gate_up": sum(inner.values())}
        return {
            **{f"{name}.weight": norm.weight for name, norm in self._norms().items()},
            **_split("self_attn", self.qkv, heads),
            **_split("self_attn", self.output, {"o": config.hidden_size}),
            **_split("mlp", self.gate_up, inner),
            **_split("mlp", self.down, {"down": config.hidden_size}),
        }

    def _norms(self) -> dict[str, Norm]:
        """Name the norms there are; without post norms, the second one's name is misleading."""
        has_post_norms = self.config.post_norms
        norms = {
            "input_layernorm": self.input_norm,
            "self_attn.q_norm": self.query_norm,
            "self_attn.k_norm": self.key_norm,
            "post_attention_layernorm": self.attention_post_norm or self.feed_forward_norm,
            "pre_feedforward_layernorm": self.feed_forward_norm if has_post_norms else None,
            "post_feedforward_layernorm": self.feed_forward_post_norm,
        }
        return {name: norm for name, norm in norms.items() if norm is not None}


def empty_norm(size: int, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Norm:
    """Allocate a norm that the loader fills."""
    weight = torch.empty(size, dtype=dtype, device=device)
    return Norm(weight, config.rms_norm_eps, is_centred=config.centred_norms)


def _split(block: str, fused: Linear, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Name the row ranges of a fused projection: ``{block}.{part}_proj.weight`` and ``.bias``."""
    named = {}
    start = 0
    for part, size in sizes.items():
        named[f"{block}.{part}_proj.weight"] = fused.weight[start : start + size]
        if fused.bias is not None:
            named[f"{block}.{part}_proj.bias"] = fused.bias[start : start + size]
        start += size
    return named

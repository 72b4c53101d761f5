"""One decoder for the Llama family: the packed forward, with attention left to the backend."""

from __future__ import annotations

import torch
from torch.nn import functional

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.model.config import ModelConfig
from headrace_worker.model.linear import Linear, empty_linear
from headrace_worker.model.rope import RotaryTable, rotate


class Decoder:
    """A model's weights and how tokens pass through them; it rounds where transformers rounds.

    Weights are allocated here and filled through ``parameters``; until then they hold garbage.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.embedding = torch.empty(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.layers = tuple(
            DecoderLayer(config, index, dtype, device) for index in range(config.num_layers)
        )
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.head = Linear(
            self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        )
        self.rotary = RotaryTable(config.rope, config.max_position_embeddings, dtype, device)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, backend: AttentionBackend) -> torch.Tensor:
        """Return hidden states ``[num_tokens, hidden_size]`` after the final norm.

        Calls ``backend.begin`` itself, then ``write_kv`` and ``attend`` once a layer.
        """
        backend.begin(batch)
        rotation = self.rotary.lookup(batch.positions)
        hidden = functional.embedding(batch.input_ids, self.embedding)
        for layer in self.layers:
            layer.forward(hidden, rotation, batch, backend)
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    @torch.no_grad()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 logits ``[num_rows, vocab_size]`` of ``[num_rows, hidden_size]``."""
        return self.head(rows).float()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return where each tensor of a checkpoint goes, by transformers' name.

        The entries are views, so copying into them fills the fused projections.
        """
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.parameters().items():
                named[f"model.layers.{index}.{name}"] = tensor
        if not self.config.tie_word_embeddings:
            named["lm_head.weight"] = self.head.weight
        return named

    def pack(self) -> int:
        """Lay the filled weights out for the device; ``parameters`` must not be called afterwards.

        Returns the bytes that this takes beyond ``weights_bytes``: the copy of a tied embedding.
        """
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.pack()
        is_tied = self.config.tie_word_embeddings
        self.head.pack(keep_weight=is_tied)
        return self.embedding.nbytes if is_tied and self.head.is_packed else 0

    @property
    def weights_bytes(self) -> int:
        """Memory of weights and rotary tables before packing, tied weights counted once."""
        tables = (self.rotary.cos, self.rotary.signed_sin)
        return sum(tensor.nbytes for tensor in (*self.parameters().values(), *tables))


class DecoderLayer:
    """Attention and feed-forward of one layer, with query, key, value and gate, up fused."""

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.index = index
        hidden, inner = config.hidden_size, config.intermediate_size
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim

        def linear(in_features: int, out_features: int, bias: bool) -> Linear:
            return empty_linear(in_features, out_features, bias, dtype, device)

        def norm(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.input_norm = norm(hidden)
        self.qkv = linear(hidden, (heads + 2 * kv_heads) * head_dim, config.qkv_bias)
        self.query_norm = norm(head_dim) if config.qk_norm else None
        self.key_norm = norm(head_dim) if config.qk_norm else None
        self.output = linear(heads * head_dim, hidden, config.output_bias)
        self.post_attention_norm = norm(hidden)
        self.gate_up = linear(hidden, 2 * inner, config.mlp_bias)
        self.down = linear(inner, hidden, config.mlp_bias)

    def forward(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size], updated in place
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: PackedBatch,
        backend: AttentionBackend,
    ) -> None:
        """Add this layer's attention, then its feed-forward, to ``hidden``."""
        eps = self.config.rms_norm_eps
        normed = rms_norm(hidden, self.input_norm, eps)
        hidden += self._attention(normed, rotation, batch, backend)
        normed = rms_norm(hidden, self.post_attention_norm, eps)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        hidden += self.down(functional.silu(gate).mul_(up))

    def _attention(
        self,
        normed: torch.Tensor,  # [num_tokens, hidden_size]
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: PackedBatch,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        config = self.config
        num_tokens, heads, kv_heads = normed.shape[0], config.num_heads, config.num_kv_heads
        fused = self.qkv(normed).view(num_tokens, heads + 2 * kv_heads, config.head_dim)
        query_key, value = fused[:, : heads + kv_heads], fused[:, heads + kv_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            query_key = torch.cat(
                (
                    rms_norm(query_key[:, :heads], self.query_norm, config.rms_norm_eps),
                    rms_norm(query_key[:, heads:], self.key_norm, config.rms_norm_eps),
                ),
                dim=1,
            )
        query_key = rotate(query_key, *rotation)
        backend.write_kv(self.index, query_key[:, heads:], value, batch)
        attended = backend.attend(
            query_key[:, :heads],
            self.index,
            batch,
            scale=config.head_dim**-0.5,
            window=config.windows[self.index],
        )
        return self.output(attended.reshape(num_tokens, heads * config.head_dim))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return where each tensor of the layer goes, by transformers' name within the layer."""
        config = self.config
        kv_size = config.num_kv_heads * config.head_dim
        sizes = {"q": config.num_heads * config.head_dim, "k": kv_size, "v": kv_size}
        inner = {"gate": config.intermediate_size, "up": config.intermediate_size}
        named = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_attention_norm,
            **_split("self_attn", self.qkv, sizes),
            **_split("self_attn", self.output, {"o": config.hidden_size}),
            **_split("mlp", self.gate_up, inner),
            **_split("mlp", self.down, {"down": config.hidden_size}),
        }
        if self.query_norm is not None and self.key_norm is not None:
            named["self_attn.q_norm.weight"] = self.query_norm
            named["self_attn.k_norm.weight"] = self.key_norm
        return named


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the last dimension to unit mean square (Zhang and Sennrich, 2019), in float32."""
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True).add_(eps))
    return (wide * inverse).to(x.dtype) * weight


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

"""One decoder for the Llama family and its like: the packed forward, layer after layer."""

from __future__ import annotations

import torch
from torch.nn import functional

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.model.config import ModelConfig
from headrace_worker.model.layer import DecoderLayer, empty_norm
from headrace_worker.model.linear import Linear, ProductShape
from headrace_worker.model.rope import RotaryTable
from headrace_worker.model.row_counts import RowCounts


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
        self.norm = empty_norm(config.hidden_size, config, dtype, device)
        self.head = Linear(
            self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        )
        self.rotary = {  # one table for all layers that rotate alike
            spec: RotaryTable(spec, config.max_position_embeddings, dtype, device)
            for spec in dict.fromkeys(config.ropes)
            if spec is not None
        }

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, backend: AttentionBackend) -> torch.Tensor:
        """Return hidden states ``[num_tokens, hidden_size]`` after the final norm.

        Calls ``backend.begin`` itself, then ``write_kv`` and ``attend`` once a layer.
        """
        backend.begin(batch)
        rotations = {spec: table.lookup(batch.positions) for spec, table in self.rotary.items()}
        hidden = self.embed(batch.input_ids)
        for layer, spec in zip(self.layers, self.config.ropes, strict=True):
            rotation = None if spec is None else rotations[spec]
            layer.forward(hidden, rotation, batch, backend)
        return self.norm(hidden)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the first hidden states ``[num_tokens, hidden_size]``."""
        hidden = functional.embedding(input_ids, self.embedding)
        scale = self.config.embedding_scale
        if scale is not None:
            # Gemma was trained with the factor rounded to the dtype, such as 55.5 for 55.4256.
            hidden *= torch.tensor(scale).to(hidden.dtype).item()
        return hidden

    @torch.no_grad()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 logits ``[num_rows, vocab_size]`` of ``[num_rows, hidden_size]``."""
        logits = self.head(rows)
        cap = self.config.logits_soft_cap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return where each tensor of a checkpoint goes, by transformers' name.

        The entries are views, so copying into them fills the fused projections.
        """
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
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
        known: dict[ProductShape, RowCounts] = {}
        for layer in self.layers:
            for linear in layer.linears:
                linear.pack(known=known)
        is_tied = self.config.tie_word_embeddings
        self.head.pack(keep_weight=is_tied, known=known)
        return self.embedding.nbytes if is_tied and self.head.is_packed else 0

    @property
    def weights_bytes(self) -> int:
        """Memory of weights and rotary tables before packing, tied weights counted once."""
        weights = sum(tensor.nbytes for tensor in self.parameters().values())
        return weights + sum(table.nbytes for table in self.rotary.values())

"""One decoder for the Llama family and its like: the packed forward, layer after layer."""

from __future__ import annotations

import torch
from torch.nn import functional

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.model.config import ModelConfig
from headrace_worker.model.layer import DecoderLayer, empty_norm
from headrace_worker.model.linear import Linear, ProductShape, Quantize
from headrace_worker.model.ranks import ALONE, Ranks, num_words_of
from headrace_worker.model.rope import RotaryTable
from headrace_worker.model.row_counts import RowCounts
from headrace_worker.model.row_ops import TORCH_ROW_OPS, RowOps, best_row_ops


class Decoder:
    """A model's weights and how tokens pass through them; it rounds where transformers rounds.

    Weights are allocated here and filled through ``parameters``; until then they hold garbage.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config  # of this rank's part, but for the vocabulary
        self.ranks = ranks
        num_words = num_words_of(ranks, config.vocab_size)
        self.embedding = torch.empty(num_words, config.hidden_size, dtype=dtype, device=device)
        self.layers = tuple(
            DecoderLayer(config, index, dtype, device, ranks) for index in range(config.num_layers)
        )
        self.norm = empty_norm(config.hidden_size, config, dtype, device)
        self.head = Linear(
            self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        )
        self.row_ops: RowOps = TORCH_ROW_OPS
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
        delta: torch.Tensor | None = None
        for layer, spec in zip(self.layers, self.config.ropes, strict=True):
            rotation = None if spec is None else rotations[spec]
            delta = layer.forward(hidden, delta, rotation, batch, backend)
        return self.row_ops.add_norm(hidden, delta, self.norm)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the first hidden states ``[num_tokens, hidden_size]``."""
        hidden = self._look_up(input_ids)
        scale = self.config.embedding_scale
        if scale is not None:
            # Gemma was trained with the factor rounded to the dtype, such as 55.5 for 55.4256.
            hidden *= torch.tensor(scale).to(hidden.dtype).item()
        return hidden

    def _look_up(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.ranks.is_alone:
            return functional.embedding(input_ids, self.embedding)
        places = input_ids - self.ranks.rank * len(self.embedding)
        is_elsewhere = (places < 0) | (places >= len(self.embedding))
        hidden = functional.embedding(places.masked_fill(is_elsewhere, 0), self.embedding)
        return self.ranks.sum(hidden.masked_fill_(is_elsewhere.unsqueeze(-1), 0))

    @torch.no_grad()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits ``[num_rows, vocab_size]`` of ``[num_rows, hidden_size]``, in our dtype.

        Of several ranks only the first gets them; the others get their own part.
        """
        logits = self.ranks.gather_columns(self.head(rows))[:, : self.config.vocab_size]
        cap = self.config.logits_soft_cap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

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

    def pack(self, quantize: Quantize | None = None) -> int:
        """Lay the filled weights out for the device; ``parameters`` must not be called afterwards.

        ``quantize`` is for the projections of the layers; the head, whose rounding would be seen in
        every choice, keeps its format.
        Returns the bytes that the weights take beyond ``weights_bytes``; fewer are negative.
        """
        self.row_ops = best_row_ops(self.embedding.dtype, self.embedding.device)
        for layer in self.layers:
            layer.row_ops = self.row_ops
        projections = [linear for layer in self.layers for linear in layer.linears]
        known: dict[ProductShape, RowCounts] = {}
        num_more_bytes = 0
        for linear in (*projections, self.head):
            num_more_bytes -= linear.nbytes
            if quantize is not None and linear is not self.head:
                linear.quantize(quantize)
            else:
                keep_weight = linear is self.head and self.config.tie_word_embeddings
                linear.pack(keep_weight=keep_weight, known=known)
            num_more_bytes += linear.nbytes
        return num_more_bytes

    @property
    def weights_bytes(self) -> int:
        """Memory of weights and rotary tables before packing, tied weights counted once."""
        weights = sum(tensor.nbytes for tensor in self.parameters().values())
        return weights + sum(table.nbytes for table in self.rotary.values())

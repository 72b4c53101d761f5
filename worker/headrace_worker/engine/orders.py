"""What the first rank tells the others: to join, then what to compute, step by step.

An order carries only what the host has to know. The tensors follow through a collective, as on a
GPU some of them were made there and never seen by the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_worker.engine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class JoinRanks:
    """First order: meet the others and load a part of the model."""

    rank: int  # 1 … size - 1
    size: int  # of all, the first included
    port: int  # of the store on loopback where they meet
    settings: EngineSettings


@dataclass(frozen=True, slots=True)
class RunForward:
    """Compute a packed batch; its tensors come next, through ``Ranks.share``."""

    num_tokens: int
    num_seqs: int
    table_width: int  # blocks, of the longest row of the block table
    num_logit_rows: int
    max_seqlen_q: int
    max_seqlen_k: int
    num_decodes: int


@dataclass(frozen=True, slots=True)
class RunLogits:
    """Compute a part of the logits; the hidden states come next, through ``Ranks.share``."""

    num_rows: int


Order = JoinRanks | RunForward | RunLogits

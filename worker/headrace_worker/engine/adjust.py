"""What a request changes in its logits before the draw: bias, penalties, masked stop tokens."""

from __future__ import annotations

import torch

from headrace_worker.engine.sequence import Sequence


def needs_adjustment(seq: Sequence) -> bool:
    """Say whether ``adjust_logits`` would change this sequence's next row."""
    spec = seq.sampling
    return bool(
        spec.logit_bias
        or spec.repetition_penalty != 1
        or spec.presence_penalty
        or spec.frequency_penalty
        or _masks_stop_tokens(seq)
    )


def adjust_logits(row: torch.Tensor, seq: Sequence) -> None:
    """Change one row ``[vocab]`` in place: logit bias, then penalties, then the min-tokens mask.

    A row may be shorter than the model's vocabulary: ids beyond it are padding and passed over.
    """
    biases = [(token_id, bias) for token_id, bias in seq.sampling.logit_bias if token_id < len(row)]
    if biases:
        token_ids, values = zip(*biases, strict=True)
        row[list(token_ids)] += torch.tensor(values, dtype=row.dtype, device=row.device)
    _penalize(row, seq)
    if _masks_stop_tokens(seq):
        known = [token_id for token_id in seq.stop_token_ids if token_id < len(row)]
        row[known] = float("-inf")


def _penalize(row: torch.Tensor, seq: Sequence) -> None:
    spec = seq.sampling
    if spec.repetition_penalty != 1:  # over prompt and output (CTRL, Keskar et al. 2019)
        seen = torch.unique(torch.tensor(seq.token_ids, device=row.device))
        seen = seen[seen < len(row)]
        logits = row[seen]
        penalty = spec.repetition_penalty
        row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
    output = seq.token_ids[seq.num_prompt_tokens :]
    if output and (spec.presence_penalty or spec.frequency_penalty):  # over output only
        said, counts = torch.unique(torch.tensor(output, device=row.device), return_counts=True)
        row[said] -= spec.presence_penalty + spec.frequency_penalty * counts.to(row.dtype)


def _masks_stop_tokens(seq: Sequence) -> bool:
    return bool(seq.stop_token_ids) and seq.num_output_tokens < seq.sampling.min_tokens

"""Grammars in the sampler: tokens that may not come next lose their logit."""

from __future__ import annotations

from collections.abc import Sequence as ReadOnlyList

import torch

from headrace_worker.engine.grammar import GrammarState

# For each byte of a mask what its eight tokens get added: nothing, or minus infinity.
_BIAS_OF_BYTE = torch.where(
    (torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 1, 0.0, float("-inf")
)


def mask_by_grammar(
    logits: torch.Tensor,  # [num_rows, vocab] float32, changed in place
    states: ReadOnlyList[GrammarState | None],  # one a row; None: no grammar
) -> None:
    """Leave each row only the tokens that its grammar takes next; others are not touched.

    A row whose grammar cannot go on has none left. Ids that the tokenizer does not know are masked.
    """
    asked = [(row, state) for row, state in enumerate(states) if state is not None]
    if not asked:
        return
    masks = next_token_masks([state for _, state in asked]).to(logits.device)
    bias = _BIAS_OF_BYTE.to(logits.device).index_select(0, masks.flatten().int())
    bias = bias.view(len(asked), -1)  # [num_grammars, tokens, padded to whole words]
    size = min(bias.shape[1], logits.shape[1])
    for index, (row, _) in enumerate(asked):
        logits[row, :size] += bias[index, :size]
        logits[row, size:] = float("-inf")


def next_token_masks(states: ReadOnlyList[GrammarState]) -> torch.Tensor:
    """Return a bit for each token id, ``[num_states, num_mask_bytes]`` uint8, all on the CPU.

    Several are computed at once. The mask of a state with an error is empty.
    """
    tokens = states[0].tokens
    masks = torch.zeros(len(states), tokens.num_mask_bytes, dtype=torch.uint8)
    unknown = [(state.matcher, index) for index, state in enumerate(states) if state.mask is None]
    if unknown:
        tokens.executor.unsafe_compute_mask_ptr(
            unknown, masks.data_ptr(), tokens.num_mask_bytes, len(states)
        )
    for index, state in enumerate(states):
        if state.matcher.is_error():
            masks[index] = 0
        elif state.mask is not None:
            masks[index] = torch.frombuffer(bytearray(state.mask), dtype=torch.uint8)
    return masks

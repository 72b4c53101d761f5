"""What requests change in their logits before the draw: bias, penalties, masked tokens.

All rows that ask are changed at once. Only single cells of ``[num_rows, vocab]`` are read and
written, so what a row gets does not depend on the others, to the bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as ReadOnlyList

import torch

from headrace_worker.engine.grammar_mask import mask_by_grammar
from headrace_worker.engine.sequence import Sequence
from headrace_worker.engine.transfer import to_device

Cells = tuple[torch.Tensor, torch.Tensor]  # rows and token ids, [num_cells] int64 each


def adjust_logits(logits: torch.Tensor, seqs: ReadOnlyList[Sequence]) -> torch.Tensor:
    """Return ``[num_rows, vocab]`` after bias, penalties and all that masks tokens.

    The tensor that came in is left alone, and comes out when nobody asks for anything. It may be
    narrower than the model's vocabulary: ids beyond it are padding and passed over.
    """
    if any(map(needs_adjustment, seqs)):
        logits = logits.clone()
        _add_biases(logits, seqs)
        _penalize_repetition(logits, seqs)
        _penalize_output(logits, seqs)
        masked = [list(_masked_token_ids(seq)) for seq in seqs]
        # Of a plain number, torch would make a copy on the device, and wait for it.
        logits[_find_cells(logits, masked)] = logits.new_full((), float("-inf"))
        mask_by_grammar(logits, [seq.grammar for seq in seqs])
    return logits


def needs_adjustment(seq: Sequence) -> bool:
    """Say whether ``adjust_logits`` may change this sequence's next row."""
    spec = seq.sampling
    return bool(
        spec.logit_bias
        or spec.repetition_penalty != 1
        or spec.presence_penalty
        or spec.frequency_penalty
        or spec.bad_words
        or seq.grammar is not None
        or _masks_stop_tokens(seq)
    )


def _add_biases(logits: torch.Tensor, seqs: ReadOnlyList[Sequence]) -> None:
    size = logits.shape[-1]
    known = [[bias for bias in seq.sampling.logit_bias if bias[0] < size] for seq in seqs]
    cells = _find_cells(logits, [[token_id for token_id, _ in biases] for biases in known])
    values = [value for biases in known for _, value in biases]
    logits[cells] += to_device(torch.tensor(values, dtype=logits.dtype), logits.device)


def _penalize_repetition(logits: torch.Tensor, seqs: ReadOnlyList[Sequence]) -> None:
    """Over prompt and output (CTRL, Keskar et al., 2019); once, however often a token came."""
    penalties = [seq.sampling.repetition_penalty for seq in seqs]
    asked = [
        seq.token_ids if penalty != 1 else [] for seq, penalty in zip(seqs, penalties, strict=True)
    ]
    cells = _find_cells(logits, asked)
    penalty = _by_row(penalties, logits)[cells[0]]
    before = logits[cells]  # a cell that is there twice is read, and written, twice the same
    logits[cells] = torch.where(before > 0, before / penalty, before * penalty)


def _penalize_output(logits: torch.Tensor, seqs: ReadOnlyList[Sequence]) -> None:
    """Over output only: presence once for each token, frequency as often as it came."""
    specs = [seq.sampling for seq in seqs]
    asked = [
        seq.token_ids[seq.num_prompt_tokens :]
        if spec.presence_penalty or spec.frequency_penalty
        else []
        for seq, spec in zip(seqs, specs, strict=True)
    ]
    if not any(asked):  # to count nothing, too, the host would wait for the device
        return
    rows, token_ids = _find_cells(logits, asked)
    size = logits.shape[-1]
    places, counts = torch.unique(rows * size + token_ids, return_counts=True)
    rows, token_ids = places // size, places % size
    presence = _by_row([spec.presence_penalty for spec in specs], logits)[rows]
    frequency = _by_row([spec.frequency_penalty for spec in specs], logits)[rows]
    logits[rows, token_ids] -= presence + frequency * counts


def _masked_token_ids(seq: Sequence) -> Iterator[int]:
    """Yield the tokens that may not come next."""
    if _masks_stop_tokens(seq):
        yield from seq.stop_token_ids
    for *head, last in seq.sampling.bad_words:
        if len(head) <= seq.num_output_tokens and seq.ends_with(head):
            yield last


def _masks_stop_tokens(seq: Sequence) -> bool:
    return bool(seq.stop_token_ids) and seq.num_output_tokens < seq.sampling.min_tokens


def _find_cells(logits: torch.Tensor, token_ids: list[list[int]]) -> Cells:
    """Return the cells of each row's token ids, without those beyond the vocabulary."""
    flat = array("q")  # an array takes them several times as fast as a tensor from lists
    for of_row in token_ids:
        flat.fromlist(of_row)
    columns = (
        torch.frombuffer(flat, dtype=torch.int64) if flat else torch.empty(0, dtype=torch.int64)
    )
    rows = torch.repeat_interleave(torch.tensor([len(of_row) for of_row in token_ids]))
    is_known = columns < logits.shape[-1]
    return to_device(rows[is_known], logits.device), to_device(columns[is_known], logits.device)


def _by_row(numbers: list[float], logits: torch.Tensor) -> torch.Tensor:
    return to_device(torch.tensor(numbers, dtype=logits.dtype), logits.device)  # [num_rows]

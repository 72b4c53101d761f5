"""All the faults that are planted, one at a time."""

from __future__ import annotations

from mutations.model_faults import MODEL_FAULTS
from mutations.paging_faults import PAGING_FAULTS
from mutations.sampling_faults import SAMPLING_FAULTS
from mutations.text_faults import TEXT_FAULTS

FAULTS = (*PAGING_FAULTS, *SAMPLING_FAULTS, *TEXT_FAULTS, *MODEL_FAULTS)

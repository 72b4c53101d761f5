"""All the faults that are planted, one at a time."""

from __future__ import annotations

from mutations.engine_faults import ENGINE_FAULTS
from mutations.model_faults import MODEL_FAULTS

FAULTS = (*ENGINE_FAULTS, *MODEL_FAULTS)

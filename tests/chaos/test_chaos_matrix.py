"""Every fault of the matrix, small and from a fixed seed; ``make chaos`` runs them at full size."""

from __future__ import annotations

import pytest

from support.chaos_fault import Fault, run_fault
from support.chaos_table import FAULTS

SEED = 20_260


SHORT = [fault for fault in FAULTS if not fault.tested_by]


@pytest.mark.parametrize("fault", SHORT, ids=lambda fault: fault.name)
def test_a_fault_is_survived(fault: Fault) -> None:
    """Nothing is lost and nothing comes twice; the red control is red."""
    result = run_fault(fault, fault.short, seed=SEED)
    if result.missing:
        pytest.skip(f"{result.missing} is not installed on this machine")
    assert result.problems == [], f"seed {SEED}: {[str(figure) for figure in result.figures]}"

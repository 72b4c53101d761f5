"""What a worker says about the kernels: once, and only what somebody can act upon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from headrace_worker import app
from headrace_worker.options import OTHER_VARIABLES
from support.intake_parts import READY


def events_of(**kernels: Any) -> list[tuple[str, str, Any]]:
    """Return level, event and detail of what is said of an engine's kernels."""
    with capture_logs() as logs:
        app._tell_loaded(replace(READY, **kernels))
    return [
        (line["log_level"], line["event"], line.get("build_s", line.get("reason")))
        for line in logs
        if line["event"].startswith("kernels.")
    ]


@pytest.mark.parametrize(
    ("kernels", "told"),
    [
        ({}, []),
        ({"kernels_build_s": 31.2504}, [("info", "kernels.built", 31.25)]),
        ({"missing_kernels": "no g++"}, [("warning", "kernels.missing", "no g++")]),
    ],
)
def test_a_worker_says_what_became_of_its_kernels(kernels: dict[str, Any], told: list[Any]) -> None:
    """A build is told with its seconds, a lack with its reason, and a ready library not at all."""
    assert events_of(**kernels) == told


def test_the_switch_is_no_unknown_setting() -> None:
    """``HEADRACE_KERNELS`` may stand in a worker's environment."""
    assert "KERNELS" in OTHER_VARIABLES

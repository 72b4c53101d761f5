"""The reporter: what goes wrong while a request is prepared is told without quoting it."""

from __future__ import annotations

import structlog

from headrace_worker.serving.metrics import Metrics
from headrace_worker.serving.reporting import Reporter
from support.serving_parts import Books

SECRET = "the text of somebody's prompt"


def test_a_fault_of_ours_is_logged_with_its_place_and_without_the_prompt() -> None:
    """Libraries quote their input in what they raise; the log names the fault and the lines."""
    request = Books().running()
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        with structlog.testing.capture_logs() as events:
            Reporter(Metrics()).tripped(request, error)
    (event,) = events
    assert event["event"] == "request.failed"
    assert event["fault"] == "KeyError"
    assert "test_reporting.py" in event["where"]
    assert SECRET not in str(event)

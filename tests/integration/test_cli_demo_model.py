"""The commands with the demo model itself: from nothing to sensible English."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.embedded import wait_until_stopped
from support.command import start
from support.waiting import PATIENCE_S

pytestmark = pytest.mark.model

GREEDY = ("--temperature", "0", "--max-tokens", "16")


def test_generate_answers_a_question(tmp_path: Path) -> None:
    """The chat template, the model and the stream end in the answer that the model gives."""
    process = start(
        "generate", "What is the capital of France?", *GREEDY, HEADRACE_STATE_DIR=str(tmp_path)
    )
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "Paris" in out
    wait_until_stopped(tmp_path)


def test_doctor_finds_nothing_wrong(tmp_path: Path) -> None:
    """The embedded server, this machine and the demo model pass every check."""
    process = start("doctor", HEADRACE_STATE_DIR=str(tmp_path))
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    assert "BAD" not in out
    assert "ok   model        smollm2-135m (llama, 30 layers, context 8192, 22.5KiB" in out
    wait_until_stopped(tmp_path)


def test_pull_finds_it_there(tmp_path: Path) -> None:
    """A second pull says so and fetches nothing."""
    process = start("pull", "smollm2-135m", HEADRACE_STATE_DIR=str(tmp_path))
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    assert "smollm2-135m: already there" in err

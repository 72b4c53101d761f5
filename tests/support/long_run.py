"""Random schedules over the oracle for minutes: ``PYTHONPATH=tests python -m support.long_run``.

Every round has fresh seeds. A schedule that fails is printed with its seed, and the run goes on;
the exit status is 1 when any failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from random import SystemRandom

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.oracle_limits import Tally
from support.oracle_machine import EngineMachine
from support.oracle_random import play_schedule

_REPORT_EVERY_S = 60.0
_ROUND = 50  # schedules by dice to one round of the state machine


def main() -> int:
    """Play until the time is over; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    torch.set_num_threads(1)
    tally = Tally()
    num_failures = play_for(minutes * 60, tally)
    _say(f"{tally}, failures {num_failures}")
    return 1 if num_failures else 0


def play_for(seconds: float, tally: Tally) -> int:
    """Play at least one round, and on until the time is over; return how many schedules failed."""
    started_s = reported_s = time.monotonic()
    num_failures = 0
    while True:
        for play in _rounds(tally):
            num_failures += not _survives(play)
        now_s = time.monotonic()
        if now_s - started_s >= seconds:
            return num_failures
        if now_s - reported_s >= _REPORT_EVERY_S:
            reported_s = now_s
            _say(f"{now_s - started_s:.0f} s: {tally}, failures {num_failures}")


def _rounds(tally: Tally) -> list[Callable[[], None]]:
    """Most schedules by dice in plain lists, some with the real sampler, some by hypothesis."""
    first = SystemRandom().getrandbits(48)
    dice = [
        lambda seed=seed: play_schedule(seed, tally, is_fast=seed % 5 > 0)
        for seed in range(first, first + _ROUND)
    ]
    return [*dice, lambda: _run_machine(tally)]


def _run_machine(tally: Tally) -> None:
    machine = type("Machine", (EngineMachine,), {"tally": tally})
    options = settings(
        max_examples=_ROUND // 5,
        stateful_step_count=30,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=options)


def _survives(play: Callable[[], None]) -> bool:
    try:
        play()
    except Exception:  # the run must go on to the end, whatever one schedule finds
        _say(traceback.format_exc())
        return False
    return True


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

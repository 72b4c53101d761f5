"""SmolLM2 at length, 64 prompts × 128 tokens: ``PYTHONPATH=tests python -m support.demo_report``.

Every answer is held against one forward of transformers, and against its ``generate``, which takes
a quarter of an hour.
"""

from __future__ import annotations

import sys

import torch

from support.demo_answers import (
    Load,
    answer_greedily,
    demo_prompts,
    judge_by_forward,
    judge_by_generate,
)
from support.demo_model import demo_model_of_transformers
from support.matrix_compare import Tally, total

LOAD = Load(
    num_prompts=64, num_tokens=128, num_blocks=128, max_num_seqs=32, max_num_batched_tokens=128
)


def main() -> int:
    """Ask, judge twice and print the verdicts; return the exit status: 1 when one is bad."""
    torch.set_num_threads(1)
    prompts = demo_prompts(LOAD.num_prompts)
    answers = answer_greedily(prompts, LOAD)
    num_cached = sum(count for outcome in answers.outcomes for _, count in outcome.admitted)
    _say(f"preemptions {answers.num_preemptions}, cached tokens {num_cached}")
    model = demo_model_of_transformers()
    by_forward = judge_by_forward(model, prompts, answers)
    _say(f"against one forward each: {by_forward}")
    by_generate = judge_by_generate(model, prompts, answers)
    _say(f"against generate: {by_generate}")
    verdict = total([by_forward, by_generate])
    if not (answers.num_preemptions and num_cached):
        verdict.failures.append("the pool was meant to be too small, and prompts to be shared")
    return _conclude(verdict)


def _conclude(verdict: Tally) -> int:
    for kind, lines in (("near-tie", verdict.near_ties), ("failure", verdict.failures)):
        for line in lines:
            _say(f"{kind}: {line}")
    _say(f"SmolLM2, {LOAD.num_prompts} × {LOAD.num_tokens}, judged twice: {verdict}")
    return 1 if verdict.failures else 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

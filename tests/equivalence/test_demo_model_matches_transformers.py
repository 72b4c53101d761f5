"""SmolLM2-135M in the whole engine, under every kind of pressure, against transformers alone."""

from __future__ import annotations

import pytest
import torch

from support.demo_answers import Load, answer_greedily, demo_prompts, judge_by_forward
from support.demo_model import demo_model_of_transformers

LOAD = Load(
    num_prompts=24, num_tokens=64, num_blocks=72, max_num_seqs=16, max_num_batched_tokens=128
)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_real_prompts_get_the_ids_of_transformers_one_by_one() -> None:
    """Chunked prefill, prefix cache and preemption in one batch leave every greedy id the same."""
    torch.set_num_threads(1)
    prompts = demo_prompts(LOAD.num_prompts)
    answers = answer_greedily(prompts, LOAD)

    assert answers.num_preemptions > 0, "the pool was meant to be too small"
    assert any(num_cached for o in answers.outcomes for _, num_cached in o.admitted)
    assert any(0 < o.num_prefill_tokens < o.num_scheduled_tokens for o in answers.outcomes)
    model = demo_model_of_transformers()
    tally = judge_by_forward(model, prompts, answers)
    assert tally.failures == []
    assert tally.num_ids == LOAD.num_prompts * LOAD.num_tokens or tally.near_ties

    answers.tokens[0][5] += 1  # the judge is not blind
    assert judge_by_forward(model, prompts[:1], answers).failures

"""SmolLM2-135M in the whole engine, under every kind of pressure, against transformers alone."""

from __future__ import annotations

import pytest

from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.settings import EngineSettings
from support.demo_model import (
    chat_prompt_ids,
    demo_model_of_transformers,
    demo_model_path,
    questions,
)
from support.oracle import request, run
from support.packed import greedy_by_transformers

NUM_PROMPTS = 16
NEW_TOKENS = 32
BLOCK_SIZE = 16
K_BYTES = 2 * 30 * 3 * 64 * 4  # layers, KV heads, head size, float32
NUM_BLOCKS = 28  # some six of the sixteen fit at their full length


@pytest.mark.model
@pytest.mark.timeout(300)
def test_sixteen_questions_get_the_ids_of_transformers_one_by_one() -> None:
    """Chunked prefill, prefix cache and preemption in one batch leave every greedy id the same."""
    prompts = dict(enumerate(chat_prompt_ids(*questions()[:NUM_PROMPTS])))
    engine, _ = load_engine(
        EngineSettings(
            model=str(demo_model_path()),
            device="cpu",
            dtype="float32",
            max_num_seqs=NUM_PROMPTS,
            max_num_batched_tokens=40,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=(NUM_BLOCKS + 1) * BLOCK_SIZE * K_BYTES,
        )
    )
    answers = run(engine, *(request(i, p, max_tokens=NEW_TOKENS) for i, p in prompts.items()))

    assert answers.num_preemptions > 0, "the pool was meant to be too small"
    assert any(num_cached for o in answers.outcomes for _, num_cached in o.admitted)
    assert any(0 < o.num_prefill_tokens < o.num_scheduled_tokens for o in answers.outcomes)
    source = demo_model_of_transformers()
    for seq_id, prompt in prompts.items():
        assert answers.tokens[seq_id] == greedy_by_transformers(source, prompt, NEW_TOKENS)

"""A request's numbers, bit for bit, alone and among sixty-three others, on every CPU format."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.messages import AddSequence
from headrace_worker.engine.settings import EngineSettings
from support.demo_model import chat_prompt_ids, demo_model_path, questions
from support.oracle import Answers, request, run
from support.tiny_models import make_tiny_model

NUM_REQUESTS = 64
NEW_TOKENS = 8
FORMATS = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def load(model: Path, dtype: str) -> Engine:
    """Load with a token budget that cuts no prompt: a cut rounds differently."""
    engine, _ = load_engine(
        EngineSettings(
            model=str(model),
            device="cpu",
            dtype=dtype,
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=16_384,
            kv_cache_memory_bytes=128 * 2**20,
            enable_prefix_caching=False,
        )
    )
    return engine


def arrive_in_waves(engine: Engine, commands: list[AddSequence]) -> Answers:
    """Let a few more arrive at each step, so that chunks and decodes of all sizes share a step."""
    waiting, answers = list(commands), Answers()
    while waiting or engine.has_work:
        arriving, waiting = waiting[:7], waiting[7:]
        for command in arriving:
            engine.add(command)
        answers.take(engine.step())
    return answers


@FORMATS
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_company_changes_no_bit_of_a_tiny_model(tmp_path: Path, family: str, dtype: str) -> None:
    """Requests have the same log-probabilities alone as among 63 others (B14)."""
    engine = load(make_tiny_model(tmp_path, family), dtype)
    commands = [
        request(
            i,
            [(i * 37 + k * k) % 300 + 3 for k in range(1 + i * 3)],
            max_tokens=NEW_TOKENS,
            logprobs=20,
            temperature=i % 2,
        )
        for i in range(NUM_REQUESTS)
    ]
    together = arrive_in_waves(engine, commands)
    for command in commands[::7]:
        alone = run(engine, command)
        assert alone.sampled[command.seq_id] == together.sampled[command.seq_id]


@pytest.mark.model
@pytest.mark.timeout(300)
def test_company_changes_no_bit_of_the_demo_model() -> None:
    """In bfloat16, SmolLM2 says the same to a question alone as among sixty-three others."""
    engine = load(demo_model_path(), "bfloat16")
    prompts = chat_prompt_ids(*questions(), *(f"Why? {text}" for text in questions()))
    commands = [
        request(i, prompt, max_tokens=NEW_TOKENS, logprobs=20)
        for i, prompt in enumerate(prompts[:NUM_REQUESTS])
    ]
    together = arrive_in_waves(engine, commands)
    for command in commands[::16]:
        alone = run(engine, command)
        assert alone.sampled[command.seq_id] == together.sampled[command.seq_id]

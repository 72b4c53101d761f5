"""A prompt that makes a real model say NaN fails alone: nobody else sees a bit of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.messages import AddSequence
from headrace_worker.engine.settings import EngineSettings
from support.oracle import Answers, request, run
from support.tiny_models import build_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

K_BYTES = 2 * 2 * 2 * 16 * 4  # layers, KV heads, head size, float32
BLOCK_SIZE = 4
NAN_TOKEN = 77  # its embedding is NaN, so all that attends to it is, too
PREFIX = [(i * i) % 60 + 3 for i in range(18)]  # four full blocks
BROKEN = [*PREFIX, NAN_TOKEN, *range(100, 120)]
SCORED: dict[str, Any] = {"max_tokens": 12, "logprobs": 3, "prompt_logprobs": 1}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of which one embedding is NaN; its head is another matrix."""
    path = tmp_path_factory.mktemp("tiny-llama")
    model = build_tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[NAN_TOKEN] = float("nan")
    model.save_pretrained(path)
    return path


def load(model_path: Path, backend: str, *, budget: int, num_blocks: int = 60) -> Engine:
    """Build an engine with a small pool, so that blocks come back into use."""
    settings = EngineSettings(
        model=str(model_path),
        device="cpu",
        dtype="float32",
        attention_backend=backend,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        kv_cache_memory_bytes=(num_blocks + 1) * BLOCK_SIZE * K_BYTES,
    )
    return load_engine(settings)[0]


def neighbours() -> list[AddSequence]:
    """Two that share the broken one's prefix and one that does not; two of them are scored."""
    return [
        request(2, [*PREFIX, 5, 6, 7], temperature=0.9, **SCORED),
        request(3, [*PREFIX, 8], max_tokens=12, logprobs=3),
        request(4, [9, 10, 11], **SCORED),
    ]


def everything_told(answers: Answers) -> tuple[object, ...]:
    """Tokens and log-probabilities of the neighbours, to the bit."""
    parts = [part for outcome in answers.outcomes for part in outcome.prompt_logprobs]
    scores = {n: [s for p in parts if p.seq_id == n for s in p.scores] for n in (2, 3, 4)}
    return answers.sampled, answers.finished, scores


@pytest.mark.parametrize("budget", [7, 16, 256])
@pytest.mark.parametrize("is_scored", [False, True], ids=["sampled", "scored"])
def test_a_nan_row_fails_alone_and_its_neighbours_are_the_same_to_the_bit(
    model_path: Path, budget: int, is_scored: bool
) -> None:
    """In any chunks and with a shared prefix, whether the NaN meets a score or the first token."""
    alone = run(load(model_path, "cpu", budget=budget), *neighbours())
    engine = load(model_path, "cpu", budget=budget)
    broken = request(1, BROKEN, prompt_logprobs=1 if is_scored else None)
    answers = run(engine, broken, *neighbours())
    assert list(answers.failed) == [1]
    assert answers.failed[1].code == "engine_failure"
    assert everything_told(answers) == everything_told(alone)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_whoever_shares_a_prefix_with_a_nan_row_is_served(
    model_path: Path, backend: str, num_steps: int
) -> None:
    """Before the NaN, in its step, or after: what is found in the cache is sound."""
    engine = load(model_path, backend, budget=7)
    alone = run(load(model_path, backend, budget=7), *neighbours())
    engine.add(request(1, BROKEN))
    for _ in range(num_steps):
        engine.step()
    assert run(engine, *neighbours()).tokens == alone.tokens


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("budget", [7, 256])
def test_blocks_that_held_nan_are_as_good_as_new_for_others(
    model_path: Path, backend: str, budget: int
) -> None:
    """Every block of the pool has held NaN; the next requests answer as on a fresh engine."""
    engine = load(model_path, backend, budget=budget, num_blocks=24)
    for seq_id in range(10, 14):
        prompt = [NAN_TOKEN, *range(seq_id, seq_id + 90)]
        assert run(engine, request(seq_id, prompt)).failed[seq_id].code == "engine_failure"
    after = run(engine, *neighbours())
    fresh = run(load(model_path, backend, budget=budget, num_blocks=24), *neighbours())
    assert everything_told(after) == everything_told(fresh)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_a_failed_request_computed_is_not_found_again(model_path: Path, backend: str) -> None:
    """The same prompt later is computed from its beginning, and fails on its own."""
    engine = load(model_path, backend, budget=7)
    run(engine, request(1, BROKEN))
    again = run(engine, request(2, BROKEN), request(3, [*PREFIX, 5], max_tokens=2))
    cached = dict(pair for outcome in again.outcomes for pair in outcome.admitted)
    assert cached[2] == 0
    assert list(again.failed) == [2]
    assert len(again.tokens[3]) == 2

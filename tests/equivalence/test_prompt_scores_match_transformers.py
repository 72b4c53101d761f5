"""Prompt log-probabilities of a real model are those of transformers, and repeat to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.messages import TokenScore
from headrace_worker.engine.scores import MAX_ROWS
from headrace_worker.engine.settings import EngineSettings
from support.oracle import Answers, request, run
from support.tiny_models import make_tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

K_BYTES = 2 * 2 * 2 * 16 * 4  # layers, KV heads, head size, float32
BLOCK_SIZE = 4
PROMPT = [(i * i * 7) % 300 + 3 for i in range(33)]
OTHERS = [request(i, [(i + j * j) % 300 + 3 for j in range(20)], max_tokens=30) for i in (7, 8, 9)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two layers."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def expected(model_path: Path) -> torch.Tensor:
    """What transformers says of each prompt token but the first, ``[32, vocab]``."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, :-1]
    return logits.log_softmax(-1)


def settings_for(model_path: Path, *, budget: int = 256, num_blocks: int = 200) -> EngineSettings:
    """Settings for a pool of that many blocks."""
    return EngineSettings(
        model=str(model_path),
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        kv_cache_memory_bytes=(num_blocks + 1) * BLOCK_SIZE * K_BYTES,
    )


def load(model_path: Path, **options: int) -> Engine:
    """Load the model."""
    return load_engine(settings_for(model_path, **options))[0]


def scores_of(answers: Answers, seq_id: int) -> list[TokenScore]:
    """Return all that was told of one prompt."""
    parts = [part for outcome in answers.outcomes for part in outcome.prompt_logprobs]
    return [score for part in parts if part.seq_id == seq_id for score in part.scores]


def check_scores(scores: list[TokenScore], expected: torch.Tensor) -> None:
    """Compare each token's own score and the five best with the whole distribution."""
    assert [score.token_id for score in scores] == PROMPT[1:]
    own = expected.gather(1, torch.tensor(PROMPT[1:])[:, None]).squeeze(1)
    assert [score.logprob for score in scores] == pytest.approx(own.tolist(), abs=1e-4)
    best = expected.topk(5).values.tolist()
    for score, values, row in zip(scores, best, expected, strict=True):
        assert [logprob for _, logprob in score.top_logprobs] == pytest.approx(values, abs=1e-4)
        told = [row[token_id].item() for token_id, _ in score.top_logprobs]
        assert told == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("budget", [5, 16, 256])
def test_prompt_scores_are_those_of_transformers_in_any_chunks(
    model_path: Path, expected: torch.Tensor, budget: int
) -> None:
    """Beside three other requests, for each token and the five most likely ones."""
    command = request(1, PROMPT, prompt_logprobs=5)
    answers = run(load(model_path, budget=budget), *OTHERS, command)
    check_scores(scores_of(answers, 1), expected)


def test_prompt_scores_survive_preemption(model_path: Path, expected: torch.Tensor) -> None:
    """In a pool too small for all, nothing is told twice and nothing is another value."""
    command = request(1, PROMPT, prompt_logprobs=5, max_tokens=30)
    answers = run(load(model_path, budget=16, num_blocks=40), *OTHERS, command)
    assert any(1 in outcome.preempted for outcome in answers.outcomes)
    check_scores(scores_of(answers, 1), expected)


def test_the_same_prompt_again_has_the_same_scores_to_the_bit(model_path: Path) -> None:
    """The cache is warm the second and third time, and none of them reads it (B29)."""
    engine = load(model_path)
    run(engine, request(1, PROMPT))
    first, second = (
        scores_of(run(engine, request(i, PROMPT, prompt_logprobs=3)), i) for i in (2, 3)
    )
    assert first == second
    assert len([None, *second]) == 33


def test_a_prompts_scores_do_not_depend_on_its_company(model_path: Path) -> None:
    """Alone and among others, where no chunk is cut, they are equal to the bit (B14)."""
    command = request(1, PROMPT, prompt_logprobs=3)
    alone = scores_of(run(load(model_path), command), 1)
    assert scores_of(run(load(model_path), *OTHERS, command), 1) == alone


def test_memory_for_scoring_is_set_aside_however_few_sequences_run(model_path: Path) -> None:
    """A prompt is scored by slices of rows, more than one sequence would ever sample."""
    settings = settings_for(model_path)
    of_one, of_all, of_more = (
        load_engine(replace(settings, max_num_seqs=count))[1].activation_bytes
        for count in (1, MAX_ROWS, MAX_ROWS + 1)
    )
    assert of_one == of_all < of_more

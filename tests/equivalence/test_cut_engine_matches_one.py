"""An engine whose model is cut over two ranks gives the ids of one, on any schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.messages import AddSequence
from headrace_worker.engine.one_ahead import OneAheadEngine
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.model.families import FAMILIES
from support.oracle import Answers, request, run
from support.ranks import cut_engine
from support.tiny_models import make_tiny_llama, make_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 4
K_BYTES = (
    2 * 2 * 2 * 16 * 4
)  # layers, KV heads, head size, float32; half of it on each of two ranks
NEW_TOKENS = 16
PROMPTS = {i: [(i * 37 + j * j) % 300 + 3 for j in range(5 + 9 * i)] for i in range(1, 5)}
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95}


def settings_for(path: Path, num_blocks: int = 200, **options: Any) -> EngineSettings:
    """Return settings under which one rank has so many blocks, and two have twice as many."""
    return EngineSettings(
        model=str(path),
        device="cpu",
        dtype="float32",
        num_threads=1,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=(num_blocks + 1) * BLOCK_SIZE * K_BYTES,
        **{"max_num_seqs": 5, "attention_backend": "reference", **options},
    )


def requests(**sampling: Any) -> list[AddSequence]:
    """All prompts, greedy unless said otherwise."""
    return [request(i, ids, max_tokens=NEW_TOKENS, **sampling) for i, ids in PROMPTS.items()]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two layers."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def answers_of(engine: Engine, *commands: AddSequence) -> Answers:
    """Run to the end; nothing may be left in the pool."""
    answers = run(engine, *commands)
    engine.scheduler.pool.check_integrity()
    assert not answers.failed
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_greedy_and_seeded_ids(tmp_path: Path, family: str) -> None:
    """Prompts in chunks beside decodes, half of the answers drawn."""
    settings = settings_for(make_tiny_model(tmp_path, family), max_num_batched_tokens=16)
    commands = [*requests()[:2], *requests(**DRAWN)[2:]]
    alone = answers_of(load_engine(settings)[0], *commands)
    with cut_engine(settings, 2) as (engine, _):
        assert answers_of(engine, *commands).tokens == alone.tokens


def test_preempted_requests_give_the_same_ids(llama: Path) -> None:
    """A pool for about half of the requests, on two ranks as on one."""
    alone = answers_of(load_engine(settings_for(llama))[0], *requests())
    with cut_engine(settings_for(llama, 13, max_num_batched_tokens=64), 2) as (engine, ready):
        assert ready.num_blocks == 27
        answers = answers_of(engine, *requests())
    assert answers.num_preemptions >= 1
    assert answers.tokens == alone.tokens


def test_steps_launched_one_ahead_give_the_same_ids(llama: Path) -> None:
    """The last token of a sequence is put into the batch before the other rank gets it."""
    commands = [*requests()[:2], *requests(**DRAWN)[2:]]
    alone = answers_of(load_engine(settings_for(llama))[0], *commands)
    ahead = settings_for(llama, one_ahead=True, max_num_batched_tokens=16)
    with cut_engine(ahead, 2) as (engine, _):
        assert isinstance(engine, OneAheadEngine)
        assert answers_of(engine, *commands).tokens == alone.tokens


def test_a_cached_prefix_gives_the_same_ids(llama: Path) -> None:
    """Blocks hold the keys of one prompt on every rank."""
    with cut_engine(settings_for(llama), 2) as (engine, _):
        first = answers_of(engine, *requests())
        again = answers_of(engine, *requests())
    cached = {seq_id: n for outcome in again.outcomes for seq_id, n in outcome.admitted}
    assert all(cached.values())
    assert again.tokens == first.tokens


def test_an_abort_leaves_the_others_as_they_were(llama: Path) -> None:
    """The ranks that follow know of no sequence, so there is nothing to tell them."""
    wanted = answers_of(load_engine(settings_for(llama))[0], *requests()).tokens
    with cut_engine(settings_for(llama, max_num_batched_tokens=16), 2) as (engine, _):
        for command in requests():
            engine.add(command)
        for _ in range(4):
            outcome = engine.step()
        assert outcome.num_scheduled_seqs
        engine.abort([2])
        rest = answers_of(engine)
    for seq_id, ids in rest.tokens.items():
        assert ids == wanted[seq_id][-len(ids) :]
    assert sorted(rest.finished) == [1, 3, 4]


def test_prompt_scores_and_logprobs_are_the_same(llama: Path) -> None:
    """Rows of any place are scored, not only those that sample."""
    command = request(1, PROMPTS[3], max_tokens=4, logprobs=2, prompt_logprobs=2)
    settings = settings_for(llama, max_num_batched_tokens=8)
    alone = answers_of(load_engine(settings)[0], command)
    with cut_engine(settings, 2) as (engine, _):
        cut = answers_of(engine, command)

    def scores(answers: Answers) -> list[float]:
        parts = [part for outcome in answers.outcomes for part in outcome.prompt_logprobs]
        return [score.logprob for part in parts for score in part.scores]

    assert len(scores(cut)) == len(PROMPTS[3]) - 1
    assert scores(cut) == pytest.approx(scores(alone), abs=1e-4)
    assert [token.logprob for token in cut.sampled[1]] == pytest.approx(
        [token.logprob for token in alone.sampled[1]], abs=1e-4
    )


def test_a_rank_has_half_the_weights_and_half_the_bytes_of_a_token(llama: Path) -> None:
    """So with the same memory, two ranks hold twice as many tokens."""
    _, alone = load_engine(settings_for(llama))
    with cut_engine(settings_for(llama), 2) as (_, ready):
        assert (alone.tensor_parallel_size, ready.tensor_parallel_size) == (1, 2)
        assert ready.kv_bytes_per_token * 2 == alone.kv_bytes_per_token == K_BYTES
        assert ready.num_blocks == 2 * alone.num_blocks + 1
        assert ready.vocab_size == alone.vocab_size
        assert ready.weights_bytes < 0.6 * alone.weights_bytes

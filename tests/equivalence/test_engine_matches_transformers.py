"""The whole engine on a tiny Llama gives the ids of ``transformers.generate`` on any schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.errors import SettingsError
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.messages import EngineReady, SampledToken, StepOutcome
from headrace_worker.engine.settings import EngineSettings
from support.engine_process import REAL_ENGINE, start_engine
from support.oracle import request, run
from support.tiny_models import make_tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

K_BYTES = 2 * 2 * 2 * 16 * 4  # layers, KV heads, head size, float32
BLOCK_SIZE = 4
NEW_TOKENS = 24
PROMPTS = {
    seq_id: [(seq_id * 37 + i * i) % 300 + 3 for i in range(5 + 9 * seq_id)]
    for seq_id in range(1, 6)
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two layers."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def expected(model_path: Path) -> dict[int, list[int]]:
    """What transformers generates greedily for each prompt, the end token ignored."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    answers = {}
    for seq_id, prompt in PROMPTS.items():
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
        )
        answers[seq_id] = generated[0, len(prompt) :].tolist()
    return answers


Loads = Callable[..., Engine]


@pytest.fixture
def load(model_path: Path) -> Loads:
    """Load the model with a pool of that many blocks."""

    def load(num_blocks: int = 200, **settings: Any) -> Engine:
        engine, ready = load_engine(
            EngineSettings(
                model=str(model_path),
                device="cpu",
                dtype="float32",
                block_size=BLOCK_SIZE,
                kv_cache_memory_bytes=(num_blocks + 1) * BLOCK_SIZE * K_BYTES,
                **{"max_num_seqs": 5, **settings},
            )
        )
        assert (ready.num_blocks, ready.kv_bytes_per_token) == (num_blocks, K_BYTES)
        return engine

    return load


def requests() -> list[Any]:
    """All prompts, greedy."""
    return [request(i, prompt, max_tokens=NEW_TOKENS) for i, prompt in PROMPTS.items()]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("budget", [5, 16, 512])
def test_chunked_prefill_beside_decodes_gives_the_same_ids(
    load: Loads, expected: dict[int, list[int]], backend: str, budget: int
) -> None:
    """Prompts cut into chunks, all requests at once."""
    engine = load(attention_backend=backend, max_num_batched_tokens=budget)
    assert run(engine, *requests()).tokens == expected


def test_one_after_the_other_gives_the_same_ids(
    load: Loads, expected: dict[int, list[int]]
) -> None:
    """Alone, without company in the batch."""
    engine = load(max_num_seqs=1)
    assert run(engine, *requests()).tokens == expected


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_preempted_requests_give_the_same_ids(
    load: Loads, expected: dict[int, list[int]], backend: str
) -> None:
    """A pool for about half of the requests, recomputation included."""
    engine = load(34, attention_backend=backend, max_num_batched_tokens=64)
    answers = run(engine, *requests())
    assert answers.num_preemptions >= 1
    assert answers.tokens == expected


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_cached_prefix_gives_the_same_ids(
    load: Loads, expected: dict[int, list[int]], backend: str
) -> None:
    """The second round finds its prompts in the cache and answers alike."""
    engine = load(attention_backend=backend)
    run(engine, *requests())
    again = run(engine, *requests())
    cached = {seq_id: n for outcome in again.outcomes for seq_id, n in outcome.admitted}
    assert cached == {i: (len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE for i, p in PROMPTS.items()}
    assert again.tokens == expected


def test_a_takeover_continues_with_the_same_ids(
    load: Loads, expected: dict[int, list[int]]
) -> None:
    """Another engine prefills prompt and emitted tokens and goes on at the next offset."""
    resumed = [
        request(
            i,
            PROMPTS[i] + expected[i][: 4 * i],
            num_prompt_tokens=len(PROMPTS[i]),
            max_tokens=NEW_TOKENS,
        )
        for i in PROMPTS
    ]
    tokens = run(load(), *resumed).tokens
    assert tokens == {i: expected[i][4 * i :] for i in PROMPTS}


def test_seeded_sampling_does_not_depend_on_the_company(load: Loads) -> None:
    """Drawn tokens are the same alone and in a batch under preemption."""
    commands = [
        request(i, prompt, max_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, seed=i)
        for i, prompt in PROMPTS.items()
    ]
    crowded = run(load(34, max_num_batched_tokens=64), *commands)
    assert crowded.num_preemptions >= 1
    alone = load(max_num_seqs=1, enable_prefix_caching=False)
    assert run(alone, *commands).tokens == crowded.tokens


def test_logprobs_are_those_of_transformers(load: Loads, model_path: Path) -> None:
    """The log-softmax of the model's own logits, for the sampled token and the best ones."""
    answers = run(load(), request(1, PROMPTS[1], max_tokens=4, logprobs=3))
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[1] + answers.tokens[1]])).logits[0]
    rows = logits[len(PROMPTS[1]) - 1 : -1].log_softmax(-1)
    for row, token in zip(rows, answers.sampled[1], strict=True):
        assert_logprobs(token, row)


def assert_logprobs(token: SampledToken, row: torch.Tensor) -> None:
    """Compare one token's log-probabilities with a row of them."""
    values, token_ids = row.topk(3)
    assert [token_id for token_id, _ in token.top_logprobs] == token_ids.tolist()
    assert [v for _, v in token.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
    assert token.logprob == pytest.approx(row[token.token_id].item(), abs=1e-4)


def test_the_real_process_loads_answers_and_reports_its_memory(
    model_path: Path, expected: dict[int, list[int]]
) -> None:
    """The same ids through the channel; the equation of the memory adds up."""
    settings = EngineSettings(
        model=str(model_path),
        model_name="tiny",
        device="cpu",
        dtype="float32",
        kv_cache_memory_bytes=2**20,
        num_threads=1,
    )
    with start_engine(command=REAL_ENGINE, settings=settings) as engine:
        ready = engine.receive(EngineReady, timeout_s=90)
        assert (ready.model, ready.device, ready.dtype) == ("tiny", "cpu", "float32")
        rest = ready.memory_budget_bytes - ready.weights_bytes - ready.activation_bytes
        assert rest == 2**20
        assert ready.num_blocks == rest // (ready.block_size * ready.kv_bytes_per_token) - 1
        engine.send(request(1, PROMPTS[1], max_tokens=NEW_TOKENS))
        outcomes = engine.receive_until(StepOutcome, lambda outcome: bool(outcome.finished))
        tokens = [token.token_id for outcome in outcomes for token in outcome.tokens]
        assert tokens == expected[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 7}, "block_size 7 is not one of"),
        ({"max_model_len": 513}, "max_model_len 513 is not in 2 … 512"),
        ({"max_model_len": 1}, "max_model_len 1 is not in"),
        ({"kv_cache_memory_bytes": 100}, "no KV block fits"),
        ({"device": "abacus"}, "unknown device 'abacus'"),
        ({"device": "cuda:99"}, "'cuda:99' is not available"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
    ],
)
def test_settings_that_do_not_suit_the_model_are_refused(
    model_path: Path, settings: dict[str, Any], message: str
) -> None:
    """Found while loading, with the value in the message."""
    with pytest.raises(SettingsError, match=message):
        load_engine(
            EngineSettings(
                **{"model": str(model_path), "device": "cpu", "dtype": "float32", **settings}
            )
        )


def test_the_context_is_fitted_to_the_pool(load: Loads) -> None:
    """What the engine reports as its context is what the KV cache can hold (B10)."""
    assert load(8).scheduler.admission.max_model_len == 8 * BLOCK_SIZE


def test_the_tiny_model_is_not_trivial(expected: dict[int, list[int]]) -> None:
    """A model that repeats one token would prove little."""
    assert all(len(set(tokens)) > NEW_TOKENS // 3 for tokens in expected.values())

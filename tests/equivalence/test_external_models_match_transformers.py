"""Models without a native decoder: our engine gives what transformers gives, on any schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_worker.attention import create_backend
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.messages import EngineReady, StepOutcome
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.model import LoadedModel, load_model
from support.engine_process import REAL_ENGINE, start_engine
from support.external_models import EXTERNAL_MODELS, build_external_model
from support.oracle import request, run
from support.packed import PackedRun, greedy_by_transformers
from support.tiny_models import build_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NEW_TOKENS = 16
PROMPTS = {
    seq_id: [(seq_id * 37 + i * i) % 300 + 3 for i in range(5 + 9 * seq_id)]
    for seq_id in range(1, 4)
}


@dataclass(frozen=True)
class External:
    """A random model as transformers has it, and where it is saved."""

    folder: Path
    source: Any
    kv_heads: int

    def load(self, model_impl: str = "auto") -> LoadedModel:
        """Load it as a worker does."""
        model = load_model(self.folder, dtype=torch.float32, device=CPU, model_impl=model_impl)
        return model.packed()

    def load_engine(self, num_blocks: int, **settings: Any) -> Engine:
        """Load it with a pool of that many blocks."""
        k_bytes = 2 * 2 * self.kv_heads * 16 * 4  # layers, KV heads, head size, float32
        engine, ready = load_engine(
            EngineSettings(
                model=str(self.folder),
                device="cpu",
                dtype="float32",
                block_size=BLOCK_SIZE,
                kv_cache_memory_bytes=(num_blocks + 1) * BLOCK_SIZE * k_bytes,
                **{"max_num_seqs": 5, **settings},
            )
        )
        assert (ready.num_blocks, ready.kv_bytes_per_token) == (num_blocks, k_bytes)
        return engine

    def greedy(self) -> dict[int, list[int]]:
        """Return what transformers generates for each prompt alone."""
        return {
            seq_id: greedy_by_transformers(self.source, prompt, NEW_TOKENS)
            for seq_id, prompt in PROMPTS.items()
        }


def build(folder: Path, name: str) -> External:
    """Save a random model."""
    source = build_external_model(name)
    source.save_pretrained(folder)
    return External(folder, source, EXTERNAL_MODELS[name][1].get("num_key_value_heads", 2))


@pytest.fixture(scope="module", params=EXTERNAL_MODELS)
def external(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> External:
    """Each architecture in turn."""
    return build(tmp_path_factory.mktemp(request.param), request.param)


def requests() -> list[Any]:
    """All prompts, greedy."""
    return [request(i, prompt, max_tokens=NEW_TOKENS) for i, prompt in PROMPTS.items()]


def test_the_engine_generates_what_transformers_does(external: External) -> None:
    """Chunks beside decodes, preemption, and a request that finds its prompt in the cache."""
    expected = external.greedy()
    engine = external.load_engine(16, max_num_batched_tokens=20)
    answers = run(engine, *requests())
    assert answers.num_preemptions >= 1
    assert answers.tokens == expected
    longest = requests()[-1]
    again = run(engine, longest, replace(longest, seq_id=9))
    assert max(n for outcome in again.outcomes for _, n in outcome.admitted) > BLOCK_SIZE
    assert again.tokens == {longest.seq_id: expected[longest.seq_id], 9: expected[longest.seq_id]}
    assert len(set().union(*expected.values())) > 4  # it is not trivial


def test_logits_of_known_text(external: External) -> None:
    """Logits at every position of three texts in one batch, chunked, agree to 1e-4."""
    texts = [PROMPTS[3], PROMPTS[1][:3], PROMPTS[2]]
    packed = PackedRun(external.load(), create_backend(None, CPU), texts).prefill(7)
    for text, logits in zip(texts, packed, strict=True):
        with torch.no_grad():
            expected = external.source(torch.tensor([text])).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_neighbour_changes_no_bit(external: External) -> None:
    """In float32 a text has the same logits, bit for bit, alone and among others (B14).

    That holds for mixtures of experts, too, whoever else chooses the same experts. The exception is
    Qwen2's, whose shared expert has a gate of one number a token: torch's sigmoid rounds numbers by
    their place in such a thin tensor.
    """
    tolerance = 1e-5 if external.source.config.model_type == "qwen2_moe" else 0.0
    model = external.load()
    texts = list(PROMPTS.values())
    together = PackedRun(model, create_backend(None, CPU), texts).prefill(1000)
    for text, logits in zip(texts, together, strict=True):
        (alone,) = PackedRun(model, create_backend(None, CPU), [text]).prefill(1000)
        torch.testing.assert_close(alone, logits, atol=tolerance, rtol=0)


def test_a_llama_is_the_same_by_either_implementation(tmp_path: Path) -> None:
    """The setting chooses whose code runs, and nothing of the answer."""
    source = build_tiny_model("llama")
    source.save_pretrained(tmp_path)
    llama = External(tmp_path, source, 2)
    native, external = llama.load("native"), llama.load("transformers")
    assert type(native.decoder) is not type(external.decoder)
    texts = list(PROMPTS.values())
    for ours, theirs in zip(
        *(PackedRun(m, create_backend(None, CPU), texts).prefill(16) for m in (native, external)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    for model_impl in ("native", "transformers"):
        engine = llama.load_engine(60, model_impl=model_impl, max_num_batched_tokens=16)
        assert run(engine, *requests()).tokens == llama.greedy()


def test_two_engines_in_one_process_do_not_meet(tmp_path: Path) -> None:
    """Two models that take turns, step by step, answer as each does alone."""
    models = [build(tmp_path / name, name) for name in ("gpt2", "starcoder2-window")]
    engines = [model.load_engine(60, max_num_batched_tokens=16) for model in models]
    for engine in engines:
        for command in requests():
            engine.add(command)
    tokens: list[dict[int, list[int]]] = [{}, {}]
    while any(engine.has_work for engine in engines):
        for engine, answers in zip(engines, tokens, strict=True):
            for token in engine.step().tokens if engine.has_work else ():
                answers.setdefault(token.seq_id, []).append(token.token_id)
    assert tokens == [model.greedy() for model in models]


def test_the_real_engine_process_serves_a_mixture_of_experts(tmp_path: Path) -> None:
    """The setting and the tokens cross the channel; nothing but the folder is needed."""
    model = build(tmp_path, "qwen3-moe")
    settings = EngineSettings(
        str(tmp_path), device="cpu", dtype="float32", kv_cache_memory_bytes=2**20, num_threads=1
    )
    with start_engine(command=REAL_ENGINE, settings=settings) as engine:
        assert engine.receive(EngineReady, timeout_s=90).max_model_len == 512
        engine.send(requests()[0])
        outcomes = engine.receive_until(StepOutcome, lambda outcome: bool(outcome.finished))
    tokens = [token.token_id for outcome in outcomes for token in outcome.tokens]
    assert tokens == model.greedy()[1]

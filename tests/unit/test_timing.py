"""The timer of steps: it sees every part, changes nothing, and is gone afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.runner import ModelRunner
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.engine.timing import StepTimer
from support.oracle import request, run
from support.tiny_models import make_tiny_model

COMMANDS = [request(i, [9 + i] * (3 + i), max_tokens=6, logprobs=2) for i in range(4)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Give an engine over a tiny model, without a prefix cache."""
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("timed"), "llama")
    settings = EngineSettings(
        model=str(folder),
        device="cpu",
        dtype="float32",
        kv_cache_memory_bytes=8 * 2**20,
        enable_prefix_caching=False,
    )
    return load_engine(settings)[0]


def state_of(runner: ModelRunner) -> list[dict[str, Any]]:
    """Return the attributes of everything that the timer stands before."""
    decoder: Any = runner.decoder
    owners = (runner, runner.backend, decoder, *decoder.layers)
    watched = ("execute", "attend", "write_kv", "logits", "row_ops", "qkv", "down")
    return [{name: vars(owner).get(name) for name in watched} for owner in owners]


def test_every_part_is_seen(engine: Engine) -> None:
    """No part takes no time, and what is left of the whole is not negative."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    with StepTimer(runner) as timer:
        answers = run(engine, *COMMANDS)
    split = timer.split()
    assert split.num_steps == len(answers.outcomes)
    parts_s = (split.linears_s, split.attention_s, split.elementwise_s, split.head_s)
    assert min(*parts_s, split.sampling_s, split.rest_s) > 0
    assert sum(parts_s) + split.sampling_s + split.rest_s == pytest.approx(split.total_s)


def test_the_timer_changes_no_answer_and_is_gone_afterwards(engine: Engine) -> None:
    """Answers have the same log-probabilities, and the engine is as it was, also after an error."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    before, plain = state_of(runner), run(engine, *COMMANDS)
    with StepTimer(runner):
        timed = run(engine, *COMMANDS)
    assert timed.sampled == plain.sampled
    with pytest.raises(KeyError), StepTimer(runner):
        raise KeyError
    assert state_of(runner) == before


def test_other_decoders_are_refused(engine: Engine) -> None:
    """The parts of a model that transformers computes cannot be told from each other."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    foreign = ModelRunner(object(), runner.backend, block_size=16, device=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="only our own decoder"):
        StepTimer(foreign)

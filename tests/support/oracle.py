"""An engine whose model is an oracle, commands for it, and what a run of steps said.

What it must say, ``oracle_answer`` knows without an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from headrace_worker.attention.base import KVCacheSpec
from headrace_worker.engine.admission import Admission
from headrace_worker.engine.block_pool import BlockPool
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.graphs import GraphedDecoder, GraphLimits, graph_sizes
from headrace_worker.engine.messages import (
    AddSequence,
    SampledToken,
    SamplingSpec,
    SequenceFailure,
    SequenceFinish,
    StepOutcome,
)
from headrace_worker.engine.one_ahead import OneAheadEngine
from headrace_worker.engine.runner import ModelRunner
from headrace_worker.engine.scheduler import Scheduler
from headrace_worker.engine.settings import Reserve
from support.fake_capture import FakeCapture
from support.oracle_answer import whole_answer
from support.oracle_backend import OracleBackend, OracleDecoder
from support.oracle_model import VOCAB_SIZE
from support.oracle_runner import ListRunner

__all__ = [
    "VOCAB_SIZE",
    "Answers",
    "OracleBackend",
    "OracleDecoder",
    "make_engine",
    "request",
    "run",
    "solo",
]


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    reserve: Reserve = Reserve.EXPECTED,
    enable_prefix_caching: bool = True,
    decoder: OracleDecoder | None = None,
    sampled_vocab_size: int | None = None,
    samples_in_lists: bool = False,
    one_ahead: bool = False,
    capture: FakeCapture | None = None,
) -> Engine:
    """Build an engine over the oracle, with the real sampler unless told to do without tensors.

    With ``capture``, decodes are replayed from its graphs.
    """
    spec = KVCacheSpec(1, 1, 1, torch.int64, torch.device("cpu"), block_size)
    backend = OracleBackend()
    backend.allocate(spec, num_blocks + 1)
    pool = BlockPool(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    scheduler = Scheduler(
        pool,
        Admission(pool, max_model_len=max_model_len, reserve=reserve),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    decoder = decoder or OracleDecoder()
    runner: ListRunner | ModelRunner = ListRunner(decoder, backend)
    if not samples_in_lists:
        limits = GraphLimits(graph_sizes(max_num_seqs), block_size, max_model_len)
        runner = ModelRunner(
            decoder if capture is None else _graphed(decoder, backend, limits, capture),
            backend,
            block_size=block_size,
            device=spec.device,
            sampled_vocab_size=sampled_vocab_size,
        )
    if one_ahead:
        return OneAheadEngine(scheduler, runner, vocab_size=VOCAB_SIZE)
    return Engine(scheduler, runner, vocab_size=VOCAB_SIZE)


def _graphed(
    decoder: OracleDecoder, backend: OracleBackend, limits: GraphLimits, capture: FakeCapture
) -> GraphedDecoder:
    backend.may_pad = True
    graphed = GraphedDecoder(decoder, backend, limits, torch.device("cpu"))
    graphed.capture(capture)
    return graphed


def request(
    seq_id: int,
    token_ids: list[int],
    *,
    num_prompt_tokens: int | None = None,
    priority: int = 4,
    salt: bytes = b"",
    **sampling: Any,
) -> AddSequence:
    """Build a command; greedy and eight tokens unless said otherwise."""
    spec = SamplingSpec(**{"max_tokens": 8, "seed": seq_id, "temperature": 0.0, **sampling})
    num_prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    return AddSequence(seq_id, tuple(token_ids), num_prompt, spec, priority, salt)


@dataclass
class Answers:
    """What a run of steps said, by sequence id."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    sampled: dict[int, list[SampledToken]] = field(default_factory=dict)
    finished: dict[int, SequenceFinish] = field(default_factory=dict)
    failed: dict[int, SequenceFailure] = field(default_factory=dict)
    outcomes: list[StepOutcome] = field(default_factory=list)

    def take(self, outcome: StepOutcome) -> None:
        """Add one step; nothing may follow a sequence's end, and each has one end."""
        self.outcomes.append(outcome)
        for token in outcome.tokens:
            assert token.seq_id not in self.finished
            assert token.seq_id not in self.failed
            self.tokens.setdefault(token.seq_id, []).append(token.token_id)
            self.sampled.setdefault(token.seq_id, []).append(token)
        for seq_id, reason in outcome.finished:
            assert seq_id not in self.finished
            self.finished[seq_id] = reason
        for failure in outcome.failed:
            assert failure.seq_id not in self.finished
            assert failure.seq_id not in self.failed
            self.failed[failure.seq_id] = failure

    @property
    def num_preemptions(self) -> int:
        return sum(len(outcome.preempted) for outcome in self.outcomes)


def run(engine: Engine, *commands: AddSequence, max_steps: int = 2000) -> Answers:
    """Add, then step until nothing is left; the books are checked after every step."""
    for command in commands:
        engine.add(command)
    answers = Answers()
    while engine.has_work:
        answers.take(engine.step())
        engine.scheduler.pool.check_integrity()
        assert len(answers.outcomes) <= max_steps, "no progress"
    return answers


def solo(command: AddSequence, *, max_model_len: int = 128) -> list[int]:
    """Return the tokens that a request must be told, worked out without an engine."""
    num_told = len(command.token_ids) - command.num_prompt_tokens
    return list(whole_answer(command, max_model_len=max_model_len).tokens[num_told:])

"""An engine whose model is an oracle: it answers by every token id it reads back from the cache.

A wrong slot, block table, position or reused block changes the answer, so "equal to the solo run"
proves the paging.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from headrace_worker.attention.base import AttentionBackend, KVCacheSpec, PackedBatch
from headrace_worker.engine.admission import Admission
from headrace_worker.engine.block_pool import BlockPool
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.messages import (
    AddSequence,
    SampledToken,
    SamplingSpec,
    SequenceFailure,
    SequenceFinish,
    StepOutcome,
)
from headrace_worker.engine.runner import ModelRunner
from headrace_worker.engine.scheduler import Scheduler
from headrace_worker.engine.settings import Reserve

VOCAB_SIZE = 64
_MASK = 2**61 - 1


class OracleBackend(AttentionBackend):
    """Stores token ids where keys would be; attending hashes all the ids up to a token."""

    name: ClassVar[str] = "oracle"

    @classmethod
    def supported_block_sizes(cls) -> tuple[int, ...]:
        return (4,)

    def allocate(self, spec: KVCacheSpec, num_blocks: int) -> None:
        self.block_size = spec.block_size
        self.cache = torch.full((num_blocks * spec.block_size,), -1, dtype=torch.int64)

    def begin(self, batch: PackedBatch) -> None:
        assert batch.cu_seqlens_q[-1] == batch.num_tokens

    def write_kv(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PackedBatch
    ) -> None:
        assert int(batch.slot_mapping.min()) >= self.block_size, "a live row writes the trash block"
        self.cache[batch.slot_mapping] = key

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        hashes = []
        bounds = batch.cu_seqlens_q.tolist()
        for index, length in enumerate(batch.seq_lens.tolist()):
            rows = [self._rows(block) for block in batch.block_table[index].tolist()]
            prefixes = _prefix_hashes([token for row in rows for token in row][:length])
            places = batch.positions[bounds[index] : bounds[index + 1]].tolist()
            hashes += [prefixes[place] for place in places]
        return torch.tensor(hashes)  # [num_tokens]

    def _rows(self, block: int) -> list[int]:
        start = block * self.block_size
        return self.cache[start : start + self.block_size].tolist()


@dataclass
class OracleDecoder:
    """Turns the hash of a prefix into logits; knobs make it prefer tokens, or break."""

    bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    nan_after: int | None = None  # rows whose last token is this one come out as NaN
    on_forward: Callable[[PackedBatch], None] | None = None  # sees every batch

    def forward(self, batch: PackedBatch, backend: AttentionBackend) -> torch.Tensor:
        """Return [num_tokens, 2]: hash of the prefix, last token."""
        if self.on_forward:
            self.on_forward(batch)
        backend.begin(batch)
        backend.write_kv(0, batch.input_ids, batch.input_ids, batch)
        hashes = backend.attend(batch.input_ids, 0, batch, scale=1.0)
        return torch.stack([hashes, batch.input_ids], dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, VOCAB_SIZE] in (-4, 4), all different, by the hash alone."""
        words = (hidden[:, :1] + torch.arange(VOCAB_SIZE)) * 0x5851F42D4C957F2D
        words = (words ^ (words >> 29)) * 0x2545F4914F6CDD1D
        logits = ((words >> 33) & 0xFFFFFF).float() / 2**21 - 4
        for token_id, bias in self.bias.items():
            logits[:, token_id] += bias
        if self.nan_after is not None:
            logits[hidden[:, 1] == self.nan_after] = float("nan")
        return logits


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
) -> Engine:
    """Build an engine over the oracle."""
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
    runner = ModelRunner(
        decoder or OracleDecoder(),
        backend,
        block_size=block_size,
        device=spec.device,
        sampled_vocab_size=sampled_vocab_size,
    )
    return Engine(scheduler, runner, vocab_size=VOCAB_SIZE)


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


def solo(command: AddSequence, decoder: OracleDecoder | None = None) -> list[int]:
    """Return the tokens of the same request alone on a fresh, roomy engine."""
    engine = make_engine(num_blocks=256, max_num_batched_tokens=512, decoder=decoder)
    return run(engine, command).tokens.get(command.seq_id, [])


def _prefix_hashes(token_ids: list[int]) -> list[int]:
    hashes, value = [], 1
    for token_id in token_ids:
        value = (value * 6364136223846793005 + token_id + 1442695040888963407) & _MASK
        hashes.append(value)
    return hashes

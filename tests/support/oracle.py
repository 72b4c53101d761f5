"""An engine whose model is an oracle: it answers by every token that it reads back from the cache.

The cache holds ids and places, and the next token is a hash of what the block table leads to. A
wrong slot, block table, position or reused block changes it; what it must be, ``oracle_model`` and
``oracle_answer`` say without an engine.
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
from support.oracle_model import ENTRY_BYTES, VOCAB_SIZE, hash_logits, hash_prefix, pack_entry


class OracleBackend(AttentionBackend):
    """Stores id and place where key and value would be; attending hashes all up to a token."""

    name: ClassVar[str] = "oracle"

    @classmethod
    def supported_block_sizes(cls) -> tuple[int, ...]:
        """Any will do."""
        return (4, 16, 8, 2, 1)

    def allocate(self, spec: KVCacheSpec, num_blocks: int) -> None:
        self.block_bytes = spec.block_size * ENTRY_BYTES
        self.block_size = spec.block_size  # tokens
        self.cache = bytearray(b"\xff" * (num_blocks * self.block_bytes))

    def begin(self, batch: PackedBatch) -> None:
        assert batch.cu_seqlens_q[-1] == batch.num_tokens

    def write_kv(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PackedBatch
    ) -> None:
        """Store ids ``key`` and places ``value``, both ``[num_tokens]``."""
        slots = batch.slot_mapping.tolist()
        assert min(slots) >= self.block_size, "a live row writes the trash block"
        for slot, token_id, place in zip(slots, key.tolist(), value.tolist(), strict=True):
            start = slot * ENTRY_BYTES
            self.cache[start : start + ENTRY_BYTES] = pack_entry(token_id, place)

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        batch: PackedBatch,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Return the hash of the prefix that ends with each new token, ``[num_tokens]``."""
        hashes = []
        places, bounds = batch.positions.tolist(), batch.cu_seqlens_q.tolist()
        tables = batch.block_table.tolist()
        for index, length in enumerate(batch.seq_lens.tolist()):
            entries = self._read(tables[index], length)
            own = places[bounds[index] : bounds[index + 1]]
            hashes += [hash_prefix(entries[: (place + 1) * ENTRY_BYTES]) for place in own]
        return torch.tensor(hashes)

    def _read(self, blocks: list[int], length: int) -> bytes:
        used = blocks[: -(-length // self.block_size)]
        assert 0 not in used, "a live row reads the trash block"
        starts = [block * self.block_bytes for block in used]
        whole = b"".join(self.cache[start : start + self.block_bytes] for start in starts)
        return whole[: length * ENTRY_BYTES]


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
        backend.write_kv(0, batch.input_ids, batch.positions, batch)
        hashes = backend.attend(batch.input_ids, 0, batch, scale=1.0)
        return torch.stack([hashes, batch.input_ids], dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[num_rows, VOCAB_SIZE]``, those of ``exact_logits`` but for the knobs."""
        ranks = b"".join(map(hash_logits, hidden[:, 0].tolist()))
        rows = torch.frombuffer(bytearray(ranks), dtype=torch.uint8).view(-1, VOCAB_SIZE)
        logits = (rows.float() * VOCAB_SIZE + torch.arange(VOCAB_SIZE)) / 2048 - 4
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

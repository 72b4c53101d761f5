"""Parts for unit tests of the serving side: a clock to set, a scripted queue, grants, outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.errors import TransportError
from headrace.functions import (
    ClaimReply,
    EmitItem,
    EmitOutcome,
    EmitReply,
    FinishOutcome,
    FinishReply,
    Grant,
    Held,
    QueueDepth,
)
from headrace.protocol import ChunkMessage, RequestMessage, TerminalMessage
from headrace.sampling import SamplingParams
from headrace.types import RequestState, RequestStatus
from headrace_worker.engine.messages import EngineReady, SampledToken, SamplingSpec, StepOutcome
from headrace_worker.serving.detokenizer import Detokenizer
from headrace_worker.serving.intake import PreparedRequest
from headrace_worker.serving.ledger import Ledger
from headrace_worker.serving.metrics import Metrics
from headrace_worker.serving.outbox import EmitPolicy
from headrace_worker.serving.ports import Room
from headrace_worker.serving.reporting import Reporter
from headrace_worker.serving.request import InFlight


class FakeClock:
    """Monotonic seconds that only tests move."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Let time pass; return what it is then."""
        self.now += seconds
        return self.now


@dataclass
class ScriptedQueue:
    """Applies emits to lists as the queue would, unless a script says what to answer.

    ``is_down`` makes every call raise TransportError before anything happens; ``loses_replies``
    afterwards.
    """

    logs: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, TerminalMessage] = field(default_factory=dict)
    emits: list[tuple[EmitItem, ...]] = field(default_factory=list)
    finishes: list[tuple[Held, int, RequestState]] = field(default_factory=list)
    released: list[tuple[tuple[Held, ...], bool]] = field(default_factory=list)
    claims: list[Room] = field(default_factory=list)
    emit_script: list[EmitOutcome] = field(default_factory=list)  # for the next items, in order
    finish_script: list[FinishReply] = field(default_factory=list)
    claim_script: list[tuple[Grant, ...]] = field(default_factory=list)
    depths: list[QueueDepth] = field(default_factory=list)
    is_down: bool = False
    loses_replies: bool = False

    async def claim(self, room: Room) -> ClaimReply:
        self._reach()
        self.claims.append(room)
        return ClaimReply(self.claim_script.pop(0) if self.claim_script else (), "0-0")

    async def wait_for_work(self, cursor: str, timeout_s: float) -> None:
        self._reach()

    async def read_token_log(self, grant: Grant) -> tuple[ChunkMessage, ...]:
        self._reach()
        tokens = self.logs.get(grant.request_id, [])
        return (ChunkMessage(tuple(tokens), ("x",) * len(tokens)),) if tokens else ()

    async def emit(self, items: Sequence[EmitItem]) -> tuple[EmitReply, ...]:
        self._reach()
        self.emits.append(tuple(items))
        replies = tuple(self._append(item) for item in items)
        self._answer()
        return replies

    async def finish(
        self, held: Held, num_tokens: int, state: RequestState, terminal: TerminalMessage
    ) -> FinishReply:
        self._reach()
        self.finishes.append((held, num_tokens, state))
        if self.finish_script:
            return self.finish_script.pop(0)
        self.ended.setdefault(held.request_id, terminal)
        self._answer()
        return FinishReply(FinishOutcome.OK, num_tokens)

    async def renew(self, held: Sequence[Held]) -> tuple[Held, ...]:
        self._reach()
        return ()

    async def release(self, held: Sequence[Held], *, strike: bool, cause: str = "") -> int:
        self._reach()
        self.released.append((tuple(held), strike))
        return len(held)

    async def status(self, held: Held) -> RequestStatus | None:
        self._reach()
        return None

    async def depth(self) -> QueueDepth:
        self._reach()
        return self.depths.pop(0) if self.depths else QueueDepth(0, 0, 0)

    def _append(self, item: EmitItem) -> EmitReply:
        log = self.logs.setdefault(item.request_id, [])
        outcome = self.emit_script.pop(0) if self.emit_script else None
        if outcome not in (None, EmitOutcome.CANCEL, EmitOutcome.FINISH):
            return EmitReply(outcome, len(log))
        if item.offset != len(log):
            is_replay = item.offset + item.num_tokens <= len(log)
            wrong = EmitOutcome.GAP if item.offset > len(log) else EmitOutcome.OVERLAP
            return EmitReply(EmitOutcome.OK if is_replay else wrong, len(log))
        log.extend(range(item.offset, item.offset + item.num_tokens))
        return EmitReply(outcome or EmitOutcome.OK, len(log))

    def _reach(self) -> None:
        if self.is_down:
            raise TransportError("Redis: down")

    def _answer(self) -> None:
        if self.loses_replies:
            raise TransportError("Redis: the reply was lost")


def make_grant(request_id: str = "r1", **fields: object) -> Grant:
    """Return a first grant of a request that was enqueued two seconds ago."""
    defaults: dict[str, object] = {
        "tenant": "acme",
        "request_id": request_id,
        "epoch": 1,
        "num_tokens": 0,
        "payload": b"",
        "cost": 20,
        "priority": 5,
        "strikes": 0,
        "attached": True,
        "enqueued_ms": 1_000_000,
        "deadline_ms": None,
        "now_ms": 1_002_000,
    }
    return Grant(**{**defaults, **fields})  # type: ignore[arg-type]


def make_prepared(
    *,
    stop: tuple[str, ...] = (),
    max_tokens: int = 10,
    emitted: tuple[int, ...] = (),
    prompt_logprobs: int | None = None,
    echo: str = "",
) -> PreparedRequest:
    """Return a prepared request of three prompt tokens whose token n is spelled chr(97 + n)."""
    detokenizer = Detokenizer(lambda token_id: bytes([97 + token_id]), stop, echo=echo)
    for token_id in emitted:
        detokenizer.append(token_id)
    return PreparedRequest(
        message=RequestMessage("r1", "acme", SamplingParams(), prompt=(1, 2, 3)),
        prompt_token_ids=(1, 2, 3),
        output_token_ids=emitted,
        sampling=SamplingSpec(max_tokens=max_tokens, seed=1, prompt_logprobs=prompt_logprobs),
        salt=b"",
        detokenizer=detokenizer,
    )


def make_ready(**fields: object) -> EngineReady:
    """Return an engine with 16 blocks of 4 tokens and room for 4 sequences."""
    defaults: dict[str, object] = {
        "model": "fake",
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "fake",
        "vocab_size": 64,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 16,
        "memory_budget_bytes": 0,
        "weights_bytes": 0,
        "activation_bytes": 0,
        "kv_bytes_per_token": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "load_s": 0.0,
    }
    return EngineReady(**{**defaults, **fields})  # type: ignore[arg-type]


def make_outcome(*tokens: SampledToken, **fields: object) -> StepOutcome:
    """Return the outcome of a step in which nothing else happened."""
    defaults: dict[str, object] = {
        "step": 1,
        "tokens": tokens,
        "finished": (),
        "failed": (),
        "admitted": (),
        "preempted": (),
        "num_running": 0,
        "num_waiting": 0,
        "free_blocks": 16,
        "num_blocks": 16,
        "num_scheduled_tokens": 0,
        "num_prefill_tokens": 0,
        "num_scheduled_seqs": 0,
        "adds_seen": 0,
        "step_s": 0.0,
    }
    return StepOutcome(**{**defaults, **fields})  # type: ignore[arg-type]


@dataclass
class Books:
    """A ledger with its surroundings."""

    queue: ScriptedQueue = field(default_factory=ScriptedQueue)
    clock: FakeClock = field(default_factory=FakeClock)
    policy: EmitPolicy = field(default_factory=EmitPolicy)
    aborted: list[int] = field(default_factory=list)
    num_left: int = 0

    def __post_init__(self) -> None:
        self.reporter = Reporter(Metrics())
        self.ledger = Ledger(
            self.queue,
            worker_id="w1",
            emit_policy=self.policy,
            reporter=self.reporter,
            clock=self.clock,
            abort=self.aborted.append,
            on_left=self._count,
        )

    def running(self, request_id: str = "r1", **options: object) -> InFlight:
        """Claim, start and admit a request."""
        names = {"stop", "prompt_logprobs", "echo"} & options.keys()
        of_request = {name: options.pop(name) for name in names}
        request = self.ledger.claim(make_grant(request_id, **options))
        assert request is not None
        seq_id = self.ledger.start(request, make_prepared(**of_request))  # type: ignore[arg-type]
        self.ledger.admitted(seq_id, 0)
        return request

    def say(self, request: InFlight, *token_ids: int) -> None:
        """Let the engine sample tokens for a request."""
        assert request.seq_id is not None
        for token_id in token_ids:
            self.ledger.record(SampledToken(request.seq_id, token_id))

    def _count(self) -> None:
        self.num_left += 1

"""A real engine process with a fake model, for tests of the queue: its answers are known before.

Run as ``python tests/support/fake_engine.py [--step-s 0.01] [--num-blocks 512] --fd N``; it speaks
the same protocol as ``headrace_worker.engine.process``. A token is a hash of the seed and
everything before it, so ``fake_answer`` tells what any worker must produce, also after a takeover.

Prompts may carry misfortune: a token id from ``Misfortune`` followed by a number n makes it happen
when output token n (from 0) is due, for example ``[5, 6, Misfortune.CRASH, 3]``.
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence as ReadOnlyList
from hashlib import blake2b
from pathlib import Path

from headrace_worker.engine.admission import Admission
from headrace_worker.engine.block_pool import BlockPool
from headrace_worker.engine.channel import Channel
from headrace_worker.engine.engine import Engine, RowResult
from headrace_worker.engine.errors import EngineStepError
from headrace_worker.engine.messages import EngineReady, PromptLogprobs, SampledToken, TokenScore
from headrace_worker.engine.process import run
from headrace_worker.engine.scheduler import ScheduledSequence, Scheduler
from headrace_worker.engine.sequence import Sequence
from headrace_worker.engine.settings import EngineSettings

FAKE_VOCAB_SIZE = 1024
FAKE_SAMPLED_IDS = 256  # answers use ids below this, so a byte tokenizer can decode them
FAKE_LOGPROB = -0.5
POLL_S = 0.005  # between looks at the gate
TALLY_RECORD = "<QI"
"""What --tally writes for each token made: the seed of its request, its offset in the output."""


class Misfortune:
    """Ids that make the engine misbehave; the next id of the prompt is the output token when."""

    CRASH = 1001  # the process is killed
    HANG = 1002  # the step never returns
    FAIL_REQUEST = 1003  # the step raises for this request alone
    BREAK_ENGINE = 1004  # the step raises for the whole batch
    WAIT = 1005  # the step waits for the gate, so that a test can act in the middle of an answer


def fake_token(seed: int, token_ids: ReadOnlyList[int]) -> int:
    """Return what follows these tokens."""
    data = struct.pack(f"<Q{len(token_ids)}I", seed, *token_ids)
    return int.from_bytes(blake2b(data, digest_size=4).digest(), "little") % FAKE_SAMPLED_IDS


def fake_answer(
    prompt: ReadOnlyList[int],
    *,
    max_tokens: int,
    seed: int,
    stop_token_ids: ReadOnlyList[int] = (),
) -> list[int]:
    """Return all output tokens of a request, the stop token included."""
    token_ids = list(prompt)
    while len(token_ids) - len(prompt) < max_tokens:
        token_ids.append(fake_token(seed, token_ids))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt) :]


class FakeRunner:
    """Takes a set time for each step and hashes instead of computing."""

    def __init__(self, step_s: float, tally: str | None = None, gate: Path | None = None) -> None:
        self._step_s = step_s
        self._gate = gate
        self._tally = open(tally, "ab", buffering=0) if tally else None  # noqa: SIM115 - for life

    def execute(self, scheduled: ReadOnlyList[ScheduledSequence]) -> list[RowResult]:
        """Answer scores, and a token for each share that samples, unless a prompt is trouble."""
        for share in scheduled:
            _meet_misfortune(share.seq, self._gate)
        time.sleep(self._step_s)
        scores = [_score(share) for share in scheduled if share.scored]
        if self._tally:
            self._tally.write(_tally_of(scheduled))
        return [*scores, *(_sample(share.seq) for share in scheduled if share.samples)]


def _tally_of(scheduled: ReadOnlyList[ScheduledSequence]) -> bytes:
    sampling = [share.seq for share in scheduled if share.samples]
    made = [(seq.sampling.seed, seq.num_output_tokens) for seq in sampling]
    return b"".join(struct.pack(TALLY_RECORD, *record) for record in made)


def _score(share: ScheduledSequence) -> PromptLogprobs:
    token_ids = [share.seq.token_ids[place] for place in share.scored]
    num_best = share.seq.sampling.prompt_logprobs or 0
    best = [((token_id, FAKE_LOGPROB),)[:num_best] for token_id in token_ids]
    scores = zip(token_ids, best, strict=True)
    told = tuple(TokenScore(token_id, FAKE_LOGPROB, top) for token_id, top in scores)
    return PromptLogprobs(share.seq.seq_id, share.scored.start, told)


def _sample(seq: Sequence) -> SampledToken:
    token_id = fake_token(seq.sampling.seed, seq.token_ids)
    if seq.sampling.logprobs is None:
        return SampledToken(seq.seq_id, token_id)
    best = [(token_id, FAKE_LOGPROB)][: seq.sampling.logprobs]
    return SampledToken(seq.seq_id, token_id, FAKE_LOGPROB, tuple(best))


def _meet_misfortune(seq: Sequence, gate: Path | None) -> None:
    prompt = seq.token_ids[: seq.num_prompt_tokens]
    for place, token_id in enumerate(prompt[:-1]):
        if seq.num_output_tokens == prompt[place + 1]:
            match token_id:
                case Misfortune.CRASH:
                    os.kill(os.getpid(), signal.SIGKILL)
                case Misfortune.HANG:
                    while True:
                        time.sleep(60)
                case Misfortune.FAIL_REQUEST:
                    raise EngineStepError("the prompt asked to fail", (seq.seq_id,))
                case Misfortune.BREAK_ENGINE:
                    raise RuntimeError("the prompt asked to break the engine")
                case Misfortune.WAIT:
                    _wait_at(gate)


def _wait_at(gate: Path | None) -> None:
    assert gate is not None, "started without --gate"
    while not gate.exists():
        time.sleep(POLL_S)


def main() -> int:
    """Serve the fake over the inherited socket."""
    parser = argparse.ArgumentParser(description="An engine process with a fake model.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the parent")
    parser.add_argument("--step-s", type=float, default=0.0, help="how long a step takes")
    parser.add_argument("--num-blocks", type=int, default=512, help="size of the block pool")
    parser.add_argument("--load-s", type=float, default=0.0, help="how long loading takes")
    parser.add_argument("--tally", help="file that gets a record of every token made")
    parser.add_argument("--gate", type=Path, help="the gate is open when this file is there")
    parser.add_argument("--load-waits", action="store_true", help="load until the gate is open")
    args = parser.parse_args()

    def load(settings: EngineSettings, _channel: Channel) -> tuple[Engine, EngineReady]:
        time.sleep(args.load_s)
        if args.load_waits:
            _wait_at(args.gate)
        engine = build_fake_engine(
            settings,
            num_blocks=args.num_blocks,
            step_s=args.step_s,
            tally=args.tally,
            gate=args.gate,
        )
        return engine, _describe(engine, settings, args.load_s)

    return run(args.fd, load)


def build_fake_engine(
    settings: EngineSettings,
    *,
    num_blocks: int = 512,
    step_s: float = 0.0,
    tally: str | None = None,
    gate: Path | None = None,
) -> Engine:
    """Build the same engine in this process."""
    pool = BlockPool(
        num_blocks,
        settings.block_size or 16,
        enable_prefix_caching=settings.enable_prefix_caching,
    )
    max_model_len = settings.max_model_len or 4096
    scheduler = Scheduler(
        pool,
        Admission(pool, max_model_len=max_model_len, reserve=settings.reserve),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    return Engine(scheduler, FakeRunner(step_s, tally, gate), vocab_size=FAKE_VOCAB_SIZE)


def _describe(engine: Engine, settings: EngineSettings, load_s: float) -> EngineReady:
    pool = engine.scheduler.pool
    return EngineReady(
        model=settings.model_name or settings.model,
        device="cpu",
        dtype="float32",
        attention_backend="fake",
        vocab_size=FAKE_VOCAB_SIZE,
        max_model_len=engine.scheduler.admission.max_model_len,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        memory_budget_bytes=pool.capacity_tokens,
        weights_bytes=0,
        activation_bytes=0,
        kv_bytes_per_token=1,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        load_s=load_s,
    )


if __name__ == "__main__":
    sys.exit(main())

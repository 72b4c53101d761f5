"""Frames carry every message unchanged, however the stream is cut, and refuse everything else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_worker.engine import framing
from headrace_worker.engine.framing import FrameDecoder, Message, encode_frame
from headrace_worker.engine.messages import (
    AbortSequences,
    Bystanders,
    Command,
    EngineFailed,
    EngineReady,
    Ping,
    Pong,
    Report,
    SampledToken,
    SequenceFailure,
    SequenceFinish,
    SetPaused,
    SetPriority,
    Shutdown,
    StepOutcome,
)
from headrace_worker.engine.orders import JoinRanks, Order, RunForward, RunLogits
from headrace_worker.engine.settings import EngineSettings, Reserve
from support.oracle import request

OUTCOME = StepOutcome(
    step=3,
    tokens=(SampledToken(1, 5), SampledToken(2, 6, -0.25, ((6, -0.25), (7, -2.5)))),
    finished=((2, SequenceFinish.LENGTH),),
    failed=(SequenceFailure(9, "engine_failure", "nicht gut – €"),),
    admitted=((1, 16),),
    preempted=(4,),
    num_running=1,
    num_waiting=2,
    free_blocks=3,
    num_blocks=4,
    num_scheduled_tokens=5,
    num_prefill_tokens=4,
    num_scheduled_seqs=1,
    adds_seen=6,
    step_s=0.5,
)
READY = EngineReady(
    "m", "cpu", "float32", "reference", 64, 128, 16, 8, 1, 2, 3, 4, 5, 6, load_s=0.5
)
MESSAGES: list[Message] = [
    EngineSettings(model="m", reserve=Reserve.WORST),
    request(1, [1, 2], seed=2**64 - 1, logit_bias=((3, -1.5),), stop_token_ids=(9,), salt=b"\x00"),
    AbortSequences((1, 2)),
    SetPaused(True),
    SetPriority(1, 9),
    Ping(7),
    Shutdown(),
    READY,
    OUTCOME,
    Pong(7, 3),
    Bystanders((4, 5)),
    EngineFailed("broken", (1, 2)),
    JoinRanks(1, 2, 45678, EngineSettings(model="m", tensor_parallel_size=2)),
    RunForward(9, 3, 5, 2, max_seqlen_q=7, max_seqlen_k=64, num_decodes=2),
    RunLogits(2),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_channel_unchanged(message: Message) -> None:
    """Equal, with tuples as tuples and enums as enums."""
    (decoded,) = FrameDecoder().feed(encode_frame(message))
    assert decoded == message
    assert repr(decoded) == repr(message)


def test_a_step_without_scores_is_a_row_of_numbers() -> None:
    """A token then takes a few bytes, and comes out as it went in."""
    outcome = replace(OUTCOME, tokens=tuple(SampledToken(n, 40_000 + n) for n in range(64)))
    frame = encode_frame(outcome)
    assert FrameDecoder().feed(frame) == [outcome]
    assert len(frame) < 64 * 5 + 150


def test_every_message_of_the_contract_has_an_example_here() -> None:
    """Whoever adds a message is reminded to give it a tag."""
    kinds = {EngineSettings, *get_args(Command), *get_args(Report), *get_args(Order)}
    assert {type(message) for message in MESSAGES} == kinds


@given(st.lists(st.integers(1, 40), max_size=60))
def test_frames_may_arrive_in_any_pieces(cuts: list[int]) -> None:
    """A stream has no message boundaries; the decoder finds them."""
    stream, decoder, decoded = b"".join(map(encode_frame, MESSAGES)), FrameDecoder(), []
    for cut in cuts:
        decoded += decoder.feed(stream[:cut])
        stream = stream[cut:]
    decoded += decoder.feed(stream)
    assert decoded == MESSAGES


def frame(body: object) -> bytes:
    """Frame a body that our encoder would not write."""
    data: bytes = msgpack.packb(body)
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame(msgpack.ExtType(99, b"")), "unknown tag 99"),
        (frame(msgpack.ExtType(5, msgpack.packb([1, 2]))), "wrong number of fields for Ping"),
        (frame(msgpack.ExtType(5, msgpack.packb(1))), "wrong number of fields for Ping"),
        (frame({"tag": 5}), "a frame holds a dict"),
        (frame(msgpack.ExtType(33, msgpack.packb([1, 2, None, []]))), "holds a SampledToken"),
        (b"\xff\xff\xff\xff", "over the limit"),
        (b"\x00\x00\x00\x01\xc1", "not valid msgpack"),
    ],
)
def test_what_is_not_a_message_is_refused(data: bytes, reason: str) -> None:
    """Nothing outside the closed table is ever built."""
    with pytest.raises(ValueError, match=reason):
        FrameDecoder().feed(data)


def test_only_messages_can_be_sent() -> None:
    """A stray object does not travel."""
    with pytest.raises(ValueError, match="does not travel"):
        encode_frame(object())  # type: ignore[arg-type]


def test_a_frame_over_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender finds out, not the receiver."""
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ValueError, match="over the limit of 10"):
        encode_frame(EngineFailed("long enough", ()))


def test_the_transport_side_needs_no_torch() -> None:
    """Framing, messages, settings and even the process module start without torch."""
    code = (
        "import sys, headrace_worker.engine.framing, headrace_worker.engine.process\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

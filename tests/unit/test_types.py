"""The values that a backend hands in and gets back."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from headrace import types
from headrace.types import (
    Chunk,
    Completion,
    FinishReason,
    RequestState,
    RequestStatus,
    Timeout,
    Timings,
    TokenLogprob,
    Usage,
)

ANSWER = Completion(
    request_id="r1",
    text="Hi",
    token_ids=(1, 2),
    finish_reason=FinishReason.STOP,
    usage=Usage(3, 2, 1),
    timings=Timings(0.1, 0.2, 0.05, 0.4),
    logprobs=(TokenLogprob(1, -0.5, ((1, -0.5),)), TokenLogprob(2, -0.1)),
    metadata={"trace": "t"},
)
STATUS = RequestStatus("r1", RequestState.RUNNING, 2, 1, 0, 5, "w1", 10.0)
VALUES = [ANSWER, STATUS, Chunk(0, (1,), "H"), Timeout(), Usage(1, 2)]


def test_total_counts_prompt_and_answer() -> None:
    """Cached tokens are part of the prompt, and are not counted again."""
    assert Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1).total_tokens == 5


@pytest.mark.parametrize(
    ("state", "is_terminal"),
    [("queued", False), ("running", False), ("finished", True), ("failed", True),
     ("cancelled", True)],
)  # fmt: skip
def test_three_states_are_an_end(state: str, is_terminal: bool) -> None:
    """A request has ended when it is finished, failed or cancelled."""
    assert RequestState(state).is_terminal is is_terminal


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_cannot_be_changed(value: object) -> None:
    """Every value is frozen: what one part of a backend reads, no other can have changed."""
    first = dataclasses.fields(value)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, first, None)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_have_no_room_for_misspelt_fields(value: object) -> None:
    """A field that does not exist cannot be set by mistake."""
    assert not hasattr(value, "__dict__")


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_travel_between_processes(value: object) -> None:
    """A pickled value is equal to the original."""
    assert pickle.loads(pickle.dumps(value)) == value


def test_answer_turns_into_json() -> None:
    """asdict gives plain types and the enum's words, which json writes as they are."""
    text = json.dumps(dataclasses.asdict(ANSWER))
    assert json.loads(text)["finish_reason"] == "stop"


def test_every_wait_is_finite_by_default() -> None:
    """Who sets nothing waits for ever on nothing."""
    assert all(isinstance(getattr(Timeout(), f.name), float) for f in dataclasses.fields(Timeout))


def test_words_of_enums_are_part_of_the_wire() -> None:
    """Renaming one would break what is stored in Redis."""
    assert [reason.value for reason in FinishReason] == [
        *("stop", "length", "deadline", "stopped_early", "cancelled", "error"),
    ]
    assert {state.value for state in types.RequestState} == {
        "queued",
        "running",
        "finished",
        "failed",
        "cancelled",
    }

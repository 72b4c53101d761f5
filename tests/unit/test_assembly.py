"""Token logs put together: whatever arrives, in whatever pieces, a reader sees each token once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.assembly import LogAssembly, StreamAssembly
from headrace.errors import EngineFailure, ErrorCode, ProtocolError, StreamUnfinished
from headrace.protocol import (
    CHUNK_FIELD,
    TERMINAL_FIELD,
    ChunkMessage,
    TerminalMessage,
    encode_chunk,
    encode_terminal,
)
from headrace.types import Chunk, FinishReason, TokenLogprob, Usage

Entry = tuple[bytes, dict[bytes, bytes]]


def chunk_entry(start: int, end: int) -> Entry:
    """Return tokens ``[start, end)``, whose ids are their offsets and whose text is ``<id>``."""
    ids = tuple(range(start, end))
    logprobs = tuple(TokenLogprob(i, -float(i)) for i in ids)
    message = ChunkMessage(ids, tuple(f"<{i}>" for i in ids), logprobs)
    return f"{end}-0".encode(), {CHUNK_FIELD: encode_chunk(message)}


def end_entry(num_tokens: int, **fields: object) -> Entry:
    """Return a terminal entry after so many tokens."""
    message = TerminalMessage(**{"finish_reason": FinishReason.STOP, **fields})
    return f"{num_tokens}-1".encode(), {TERMINAL_FIELD: encode_terminal(message)}


def read(entries: list[Entry], after: int = 0) -> tuple[LogAssembly, list[Chunk]]:
    """Feed a log and return what it gave."""
    log = LogAssembly("r1", "log", after=after)
    return log, [c for entry in entries if (c := log.feed(*entry)) is not None]


def test_chunks_are_passed_on_as_they_came() -> None:
    """Entries that follow each other become chunks with offsets, ids, text and logprobs."""
    log, chunks = read([chunk_entry(0, 2), chunk_entry(2, 3), end_entry(3)])
    assert [chunk.index for chunk in chunks] == [0, 2]
    assert chunks[0].text == "<0><1>"
    assert log.completion().token_ids == (0, 1, 2)
    assert [p.logprob for p in log.completion().logprobs or ()] == [0.0, -1.0, -2.0]


def test_logprobs_of_the_prompt_come_with_the_end() -> None:
    """They are in the terminal entry, so a reader that came late has all of them, too."""
    scores = (None, TokenLogprob(7, -0.5, ((3, -0.25),)))
    log, _ = read([chunk_entry(1, 2), end_entry(2, prompt_logprobs=scores)], after=1)
    assert log.completion().prompt_logprobs == scores
    log, _ = read([end_entry(0)])
    assert log.completion().prompt_logprobs is None


def test_duplicate_is_dropped() -> None:
    """An entry that was read before adds nothing."""
    _, chunks = read([chunk_entry(0, 2), chunk_entry(0, 2), chunk_entry(0, 1), chunk_entry(2, 3)])
    assert [chunk.token_ids for chunk in chunks] == [(0, 1), (2,)]


def test_overlap_is_cut_at_the_token() -> None:
    """An entry that begins before and ends after what is here gives its new tokens only."""
    _, chunks = read([chunk_entry(0, 3), chunk_entry(1, 5)])
    assert chunks[1].index == 3
    assert (chunks[1].token_ids, chunks[1].text) == ((3, 4), "<3><4>")
    assert len(chunks[1].logprobs or ()) == 2


@pytest.mark.parametrize("late", [chunk_entry(3, 4), end_entry(3)])
def test_gap_is_an_error(late: Entry) -> None:
    """An entry that leaves tokens out raises ProtocolError that names both offsets."""
    with pytest.raises(ProtocolError, match="skips from offset 2 to 3"):
        read([chunk_entry(0, 2), late])


def test_unknown_field_is_an_error() -> None:
    """An entry without a known field raises ProtocolError."""
    with pytest.raises(ProtocolError, match="has fields"):
        read([(b"1-0", {b"z": b"?"})])


def test_nothing_follows_the_end() -> None:
    """After the terminal entry, whatever is fed is dropped."""
    _, chunks = read([end_entry(0), chunk_entry(0, 1)])
    assert chunks == []


def test_cursor_reads_on_behind_the_last_token_and_before_the_end() -> None:
    """The cursor is the entry id of the last token, so that the end at the same offset follows."""
    log, _ = read([chunk_entry(0, 7)])
    assert log.cursor == "7-0"
    assert LogAssembly("r1", "log", after=3).cursor == "3-0"


def test_text_held_back_comes_with_the_end() -> None:
    """Text in the terminal entry becomes a last chunk without tokens."""
    log, chunks = read([chunk_entry(0, 1), end_entry(1, text="!")])
    assert chunks[-1] == Chunk(index=1, token_ids=(), text="!")
    assert log.completion().text == "<0>!"


def test_completion_needs_the_end() -> None:
    """Before the terminal entry there is no completion."""
    log, _ = read([chunk_entry(0, 1)])
    with pytest.raises(StreamUnfinished, match="'r1'"):
        log.completion()


def test_terminal_error_is_raised_as_its_class() -> None:
    """An error in the terminal entry becomes the exception of its code, with id and worker."""
    end = end_entry(
        1,
        finish_reason=FinishReason.ERROR,
        error_code=ErrorCode.ENGINE_FAILURE,
        error_message="out of luck",
        worker_id="w1",
    )
    log, _ = read([chunk_entry(0, 1), end])
    with pytest.raises(EngineFailure, match="request 'r1': out of luck") as caught:
        log.completion()
    assert caught.value.worker_id == "w1"


def test_usage_is_the_workers_count() -> None:
    """Counts come from the worker; without any, what was read is counted."""
    log, _ = read([chunk_entry(0, 1), end_entry(1, usage=Usage(5, 1, 4))])
    assert log.completion().usage == Usage(5, 1, 4)
    assert read([chunk_entry(0, 2), end_entry(2)])[0].completion().usage == Usage(0, 2)


@st.composite
def _deliveries(draw: st.DrawFn) -> tuple[int, list[Entry]]:
    """Draw a log of n tokens and a delivery of it: cut anyhow, pieces repeated, never a gap."""
    num_tokens = draw(st.integers(1, 30))
    entries, have = [], 0
    while have < num_tokens:
        start = draw(st.integers(0, have))
        end = draw(st.integers(start + 1, num_tokens))
        entries.append(chunk_entry(start, end))
        have = max(have, end)
    return num_tokens, [*entries, end_entry(num_tokens)]


@given(_deliveries(), st.integers(0, 30))
def test_any_delivery_gives_each_token_once(delivery: tuple[int, list[Entry]], after: int) -> None:
    """However a log is cut, repeated and resumed, each token after the offset comes once."""
    num_tokens, entries = delivery
    after = min(after, num_tokens)
    log, chunks = read(entries, after)
    assert [i for chunk in chunks for i in chunk.token_ids] == list(range(after, num_tokens))
    assert [c.index for c in chunks] == [c.token_ids[0] for c in chunks]
    assert log.completion().text == "".join(f"<{i}>" for i in range(after, num_tokens))


def _two_logs() -> tuple[StreamAssembly, LogAssembly, LogAssembly]:
    logs = [LogAssembly(f"r1/{i}", f"log{i}", choice=i) for i in range(2)]
    return StreamAssembly("r1", logs), logs[0], logs[1]


def test_streams_are_merged_in_the_order_of_arrival() -> None:
    """Chunks of several answers come as they were fed, each with the number of its answer."""
    stream, first, second = _two_logs()
    stream.feed(second, [chunk_entry(0, 1)])
    stream.feed(first, [chunk_entry(0, 1), chunk_entry(1, 2)])
    assert [stream.take().choice for _ in range(3)] == [1, 0, 0]  # type: ignore[union-attr]
    assert stream.take() is None


def test_merged_stream_ends_with_its_last_answer() -> None:
    """A stream of several answers is finished when all are, and counts their tokens together."""
    stream, first, second = _two_logs()
    stream.feed(first, [chunk_entry(0, 1), end_entry(1, usage=Usage(5, 1))])
    assert not stream.is_finished
    assert stream.unfinished == [second]
    stream.feed(second, [chunk_entry(0, 2), end_entry(2, usage=Usage(5, 2))])
    answer = stream.completion()
    assert (answer.request_id, answer.usage) == ("r1", Usage(5, 3))
    assert [choice.request_id for choice in answer.choices] == ["r1/0", "r1/1"]


def test_one_error_ends_the_merged_stream() -> None:
    """An answer that fails ends the stream, though others could go on."""
    stream, first, _ = _two_logs()
    stream.feed(
        first,
        [end_entry(0, finish_reason=FinishReason.ERROR, error_code=ErrorCode.ENGINE_FAILURE)],
    )
    assert stream.is_finished
    with pytest.raises(EngineFailure):
        stream.completion()


def test_logprobs_of_a_long_answer_are_put_together_in_linear_time() -> None:
    """Each chunk is added to what is there, which is not copied for it."""
    log = LogAssembly("r1", "log")
    log.feed(*chunk_entry(0, 1))
    kept = log._logprobs
    log.feed(*chunk_entry(1, 2))
    assert log._logprobs is kept
    log.feed(*end_entry(2))
    assert [p.token_id for p in log.completion().logprobs or ()] == [0, 1]

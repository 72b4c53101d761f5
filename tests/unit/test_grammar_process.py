"""The engine's loop goes on while a grammar is compiled, and sleeps when it only waits for one."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from llguidance import LLMatcher

from headrace_worker.engine.channel import Channel
from headrace_worker.engine.framing import Message
from headrace_worker.engine.grammar import GrammarTokens
from headrace_worker.engine.messages import (
    AbortSequences,
    Ping,
    Pong,
    SetPaused,
    Shutdown,
    StepOutcome,
)
from headrace_worker.engine.process import serve
from support.grammars import (
    GRAMMAR_TIMEOUT_S,
    choice_grammar,
    make_grammar_engine,
    oracle_tokens,
    regex_grammar,
    text_of,
)
from support.oracle import Answers, request, run

CHOICE = choice_grammar("abc", "the true thing")


class Parent:
    """The transport's side of a loop that runs in a thread."""

    def __init__(self, sock: socket.socket, gate: threading.Event, cpu_clock: int) -> None:
        self._socket = sock
        self._cpu_clock = cpu_clock  # of the engine's thread
        self._channel = Channel(sock)
        self._arrived: list[Message] = []
        self.gate = gate  # set: grammars may be compiled
        self.answers = Answers()

    def send(self, *messages: Message) -> None:
        for message in messages:
            self._channel.send(message)

    def receive(self) -> Message:
        """Return the next report, and remember what it says."""
        while not self._arrived:
            self._arrived += self._channel.receive()
        report = self._arrived.pop(0)
        if isinstance(report, StepOutcome):
            self.answers.take(report)
        return report

    def wait_for(self, *seq_ids: int) -> None:
        """Receive until these have ended."""
        while not {*seq_ids} <= {*self.answers.finished, *self.answers.failed}:
            self.receive()

    def cpu_s_of_silence(self, duration_s: float) -> float:
        """Return the processor time that the engine's thread uses while nothing is reported."""
        used_s = time.clock_gettime(self._cpu_clock)
        assert not select.select([self._socket], [], [], duration_s)[0]
        return time.clock_gettime(self._cpu_clock) - used_s

    def ping(self) -> Pong:
        """Return the answer to a ping, past whatever comes before."""
        self.send(Ping(1))
        while not isinstance(report := self.receive(), Pong):
            pass
        return report


@contextmanager
def serving(
    compile_timeout_s: float = GRAMMAR_TIMEOUT_S, tokens: GrammarTokens | None = None
) -> Iterator[Parent]:
    """Serve an engine whose grammars are compiled only when the gate is open."""
    gate = threading.Event()

    def load() -> GrammarTokens:
        assert gate.wait(GRAMMAR_TIMEOUT_S)
        return tokens or oracle_tokens()

    ours, theirs = socket.socketpair()
    engine = make_grammar_engine(load_tokens=load, compile_timeout_s=compile_timeout_s)
    loop = threading.Thread(target=serve, args=(engine, Channel(theirs), []))
    loop.start()
    assert loop.ident is not None
    parent = Parent(ours, gate, time.pthread_getcpuclockid(loop.ident))
    try:
        yield parent
    finally:
        gate.set()
        parent.send(Shutdown())
        loop.join(GRAMMAR_TIMEOUT_S)
        ours.close()
        theirs.close()
    assert not loop.is_alive()


@contextmanager
def stuck_tokens() -> Iterator[GrammarTokens]:
    """Give tokens with which one grammar is compiled for as long as the block lasts."""
    is_over = threading.Event()

    class Stuck(GrammarTokens):
        def compile(self, grammar: str) -> LLMatcher:
            if grammar == CHOICE:
                is_over.wait(GRAMMAR_TIMEOUT_S)
            return super().compile(grammar)

    tokens = oracle_tokens()
    try:
        yield Stuck(tokens.tokenizer, tokens.executor, tokens.eos_token_ids, tokens.eos_mask)
    finally:
        is_over.set()


def test_others_get_their_tokens_while_a_grammar_is_compiled() -> None:
    """A compile that takes for ever delays nobody; when it ends, its sequence runs (B49)."""
    with serving() as parent:
        parent.send(request(1, [4], grammar=CHOICE), request(2, [5]), request(3, [6]))
        parent.wait_for(2, 3)
        assert 1 not in parent.answers.tokens
        told = {seq_id: list(parent.answers.tokens[seq_id]) for seq_id in (2, 3)}
        assert told == run(make_grammar_engine(), request(2, [5]), request(3, [6])).tokens
        parent.gate.set()
        parent.wait_for(1)
        assert text_of(parent.answers.tokens[1]) in ("abc", "the true thing")


def test_a_loop_that_only_waits_for_a_grammar_sleeps_and_answers() -> None:
    """No step is made for nothing, no processor time is used, a ping is heard."""
    with serving() as parent:
        parent.send(request(1, [4], grammar=CHOICE))
        assert parent.ping().step == 0
        assert parent.cpu_s_of_silence(0.3) < 0.1
        assert parent.ping().step == 0
        parent.gate.set()
        parent.wait_for(1)


def test_an_abort_is_heard_while_the_grammar_is_compiled() -> None:
    """The blocks are told free at once, and the compile ends unnoticed (B36)."""
    with serving() as parent:
        parent.send(request(1, [4], grammar=CHOICE), AbortSequences((1,)))
        report = parent.receive()
        assert isinstance(report, StepOutcome)
        assert report.free_blocks == report.num_blocks
        parent.gate.set()
        parent.send(request(2, [4], grammar=CHOICE))
        parent.wait_for(2)
        assert 1 not in {*parent.answers.tokens, *parent.answers.finished, *parent.answers.failed}


def test_a_paused_loop_takes_the_compiled_grammar_and_runs_it_later() -> None:
    """It does not spin on what it may not step."""
    with serving() as parent:
        parent.send(SetPaused(True), request(1, [4], grammar=CHOICE))
        parent.gate.set()
        assert parent.cpu_s_of_silence(0.3) < 0.15
        assert parent.ping().step == 0
        parent.send(SetPaused(False))
        parent.wait_for(1)


def test_a_compile_over_the_bound_fails_that_request_alone() -> None:
    """It is told without anybody asking, and the next grammar is compiled."""
    with stuck_tokens() as tokens, serving(compile_timeout_s=1.0, tokens=tokens) as parent:
        parent.gate.set()
        parent.send(request(1, [4], grammar=CHOICE), request(2, [5]))
        parent.wait_for(1, 2)
        assert "took more than 1 s" in parent.answers.failed[1].message
        parent.send(request(3, [4], grammar=regex_grammar("[a-c]{2}")))
        parent.wait_for(3)
        assert len(text_of(parent.answers.tokens[3])) == 2

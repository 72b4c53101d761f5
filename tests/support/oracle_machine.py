"""The play as a state machine of hypothesis, which shrinks what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace_worker.engine.settings import Reserve
from support.oracle import request
from support.oracle_limits import Limits, Tally
from support.oracle_play import Play
from support.oracle_requests import POISON, PRIORITIES, SALTS, STEMS, WISHES

_BLOCK_SIZES = (4, 1, 2, 16)


@st.composite
def _limits(draw: st.DrawFn) -> Limits:
    block_size = draw(st.sampled_from(_BLOCK_SIZES))
    return Limits(
        num_blocks=draw(st.integers(32, 100)) // block_size,
        block_size=block_size,
        max_model_len=draw(st.sampled_from([64, 24])),
        max_num_seqs=draw(st.integers(1, 6)),
        budget=draw(st.integers(1, 24)),
        reserve=draw(st.sampled_from(Reserve)),
        caching=draw(st.booleans()),
        poison=draw(st.sampled_from([None, POISON])),
        is_hopeful=draw(st.booleans()),
        is_fast=draw(st.booleans()),
        has_graphs=draw(st.booleans()),
        is_ahead=draw(st.booleans()),
    )


class EngineMachine(RuleBasedStateMachine):
    """Adds, takes over, aborts, breaks and steps, in any order.

    A subclass gives the tally that its schedules are counted in.
    """

    tally: ClassVar[Tally]
    _play: Play | None = None  # until it has started

    @initialize(limits=_limits())
    def start(self, limits: Limits) -> None:
        """Build an engine."""
        self._play = Play(limits, self.tally)

    @rule(
        prompt=st.builds(
            lambda stem, length, own: [*stem[:length], *(byte % 64 for byte in own)],
            st.sampled_from(STEMS),
            st.integers(0, 20),
            st.binary(min_size=1, max_size=6),
        ),
        wishes=st.tuples(st.sampled_from(WISHES), st.sampled_from(WISHES)),
        delivery=st.tuples(st.sampled_from(PRIORITIES), st.sampled_from(SALTS)),
        max_tokens=st.integers(1, 30),
        n=st.integers(1, 3),
        seed=st.integers(0, 2**32),
    )
    def add(
        self,
        prompt: list[int],
        wishes: tuple[Mapping[str, Any], Mapping[str, Any]],
        delivery: tuple[int, bytes],
        max_tokens: int,
        n: int,
        seed: int,
    ) -> None:
        """A request for ``n`` answers: the same prompt, with seeds that follow each other."""
        options = {**wishes[0], **wishes[1], "max_tokens": max_tokens}
        priority, salt = delivery
        prompt = prompt[: self.play.limits.context - 1]
        for index in range(n):
            self.play.add(
                request(0, prompt, priority=priority, salt=salt, seed=seed + index, **options)
            )

    @rule(which=st.integers(0, 30), num_told=st.integers(1, 30))
    @precondition(lambda self: self.play.num_ids > 0)
    def take_over(self, which: int, num_told: int) -> None:
        """A request comes from another worker."""
        self.play.take_over(which, num_told)

    @rule(which=st.integers(0, 30))
    @precondition(lambda self: self.play.num_ids > 0)
    def add_again(self, which: int) -> None:
        """A command is repeated."""
        self.play.add_again(which)

    @rule(which=st.integers(0, 30))
    @precondition(lambda self: self.play.num_ids > 0)
    def abort(self, which: int) -> None:
        """A request is cancelled."""
        self.play.abort(which)

    @rule(which=st.integers(0, 30), priority=st.sampled_from(PRIORITIES))
    @precondition(lambda self: self.play.num_ids > 0)
    def reprioritise(self, which: int, priority: int) -> None:
        """A request is wanted sooner or later."""
        self.play.reprioritise(which, priority)

    @rule(which=st.integers(0, 6), is_late=st.booleans())
    @precondition(lambda self: self.play.num_ids > 0)
    def fail_a_step(self, which: int, is_late: bool) -> None:
        """A step fails for one sequence."""
        self.play.fail_a_step(which, is_late)

    @rule()
    @precondition(lambda self: self.play.num_ids > 0)
    def run_out_of_memory(self) -> None:
        """A step finds no memory."""
        self.play.run_out_of_memory()

    @rule(count=st.integers(1, 12))
    @precondition(lambda self: self.play.num_ids > 0)
    def steps(self, count: int) -> None:
        """The engine does some steps."""
        for _ in range(count):
            self.play.step()

    def teardown(self) -> None:
        """All that is left ends; after a failure there is nothing to learn from the rest."""
        if self._play and self._play.is_sound:
            self._play.drain()

    @property
    def play(self) -> Play:
        """The play, once it has started."""
        assert self._play is not None
        return self._play

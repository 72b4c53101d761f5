"""The options of the matrix: everything that must not change a token, as plays over a workload."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from headrace_worker.attention import available_backends
from support.matrix_play import Arrival, Event, Moment, Play
from support.matrix_workload import Ask

Answers = Sequence[Sequence[int]]  # to each request of the workload
Option = Callable[[Sequence[Ask], Answers, random.Random], list[Play]]

SMALL_BLOCK = 4  # tokens
# Kinds of requests whose next token needs nothing that the host has to know of the last.
_NEVER_WAITED_FOR = {"greedy", "temperature", "top-p", "top-k", "min-p", "all filters", "n"}
_NEVER_WAITED_FOR |= {"bias", "stops"}
TIGHT: dict[str, Any] = {"block_size": SMALL_BLOCK, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def alone(asks: Sequence[Ask]) -> Play:
    """Return the baseline: one by one, each prompt in one piece, nothing remembered."""
    rounds = tuple((Arrival(ask),) for ask in range(len(asks)))
    return Play(rounds, {"max_num_seqs": 1, "enable_prefix_caching": False})


def in_company(asks: Sequence[Ask], rng: random.Random) -> list[Play]:
    """Return plays that compute every prompt in one piece: a cut rounds differently in bfloat16."""
    uncut = {"max_num_batched_tokens": 16_384, "enable_prefix_caching": False}
    shuffled = [Arrival(ask, at_step=rng.randint(0, 9)) for ask in range(len(asks))]
    rng.shuffle(shuffled)
    return [
        Play((_all(asks),), uncut),
        Play((tuple(shuffled),), uncut),
        Play((_all(asks),), {**uncut, "max_num_seqs": 3, "block_size": SMALL_BLOCK}),
    ]


def _together(asks: Sequence[Ask], **settings: Any) -> Play:
    return Play((_all(asks),), settings)


def _all(asks: Sequence[Ask], **options: Any) -> tuple[Arrival, ...]:
    return tuple(Arrival(ask, **options) for ask in range(len(asks)))


def _shuffled(asks: Sequence[Ask], rng: random.Random) -> Play:
    arrivals = [Arrival(ask, at_step=rng.randint(0, 3)) for ask in range(len(asks))]
    rng.shuffle(arrivals)
    return Play((tuple(arrivals),))


def _one_token_a_step(asks: Sequence[Ask], rng: random.Random) -> Play:
    few = sorted(rng.sample(range(len(asks)), 4))
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
    return Play((tuple(map(Arrival, few)),), settings, must=frozenset({Event.CHUNKED_PROMPT}))


def _chunks(budget: int, max_num_seqs: int) -> Option:
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs}
    must = frozenset({Event.CHUNKED_PROMPT, Event.MIXED_STEP})
    return lambda asks, answers, rng: [Play((_all(asks),), settings, must=must)]


def _warm(asks: Sequence[Ask], **settings: Any) -> Play:
    """The first alone, so that some find the beginning of their prompt; then all find all."""
    rounds = ((Arrival(0),), _all(asks), _all(asks))
    return Play(rounds, settings, must=frozenset({Event.CACHE_HIT}))


def tight_pool(asks: Sequence[Ask]) -> int:
    """Return the blocks for little more than the largest request alone."""
    longest = max(len(ask.prompt) + ask.sampling.max_tokens for ask in asks)
    return -(-longest * 3 // (2 * SMALL_BLOCK))


def _preempted(asks: Sequence[Ask], **settings: Any) -> Play:
    must = frozenset({Event.PREEMPTION})
    return Play((_all(asks),), {**TIGHT, **settings}, tight_pool(asks), must)


def _aborted(moment: Moment) -> Option:
    """Neighbours with the prompts of the greedy requests, beside all, leave at that moment."""

    def plays(asks: Sequence[Ask], answers: Answers, rng: random.Random) -> list[Play]:
        priority = 9 if moment is Moment.PREEMPTED else 5
        doomed = tuple(
            Arrival(ask, at_step=ask, drop_when=moment, priority=priority) for ask in range(3)
        )
        arrivals = (*_all(asks, at_step=1), *doomed)
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "block_size": SMALL_BLOCK}
        num_blocks = tight_pool(asks) if moment is Moment.PREEMPTED else None
        return [Play((arrivals,), settings, num_blocks, frozenset({Event.DROP}))]

    return plays


def _taken_over(asks: Sequence[Ask], answers: Answers, rng: random.Random) -> list[Play]:
    known = [rng.randint(0, len(answers[ask])) for ask in range(len(asks))]
    arrivals = tuple(Arrival(ask, num_known=count) for ask, count in enumerate(known))
    return [Play((arrivals,), {"max_num_batched_tokens": 32, "max_num_seqs": 8})]


def _taken_over_everywhere(asks: Sequence[Ask], answers: Answers, rng: random.Random) -> list[Play]:
    """Every offset of a few answers: a takeover that a warm cache meets, too."""
    few = rng.sample(range(len(asks)), 3)
    arrivals = [
        Arrival(ask, num_known=count) for ask in few for count in range(len(answers[ask]) + 1)
    ]
    rng.shuffle(arrivals)
    return [Play((tuple(arrivals),), {"block_size": SMALL_BLOCK, "max_num_seqs": 16})]


def _with_priorities(asks: Sequence[Ask], rng: random.Random) -> Play:
    arrivals = tuple(
        Arrival(ask, at_step=rng.randint(0, 9), priority=rng.randint(0, 9))
        for ask in range(len(asks))
    )
    return Play((arrivals,), TIGHT, tight_pool(asks))


def _tenants(asks: Sequence[Ask]) -> Play:
    rounds = tuple(_all(asks, salt=salt) for salt in (b"one", b"two", b"one"))
    return Play(rounds, TIGHT, must=frozenset({Event.CACHE_HIT}))


def _random_arrival(ask: int, answers: Answers, rng: random.Random) -> Arrival:
    return Arrival(
        ask,
        at_step=rng.randint(0, 12),
        num_known=rng.choice((0, 0, rng.randint(0, len(answers[ask])))),
        drop_when=rng.choice((None, None, None, *Moment)),
        priority=rng.choice((5, 5, rng.randint(0, 9))),
        salt=rng.choice((b"", b"", b"other")),
    )


def _one_ahead(asks: Sequence[Ask], answers: Answers, rng: random.Random) -> list[Play]:
    """Each step is scheduled while the one before is in flight; no token knows."""
    known = [rng.randint(0, len(answers[ask])) for ask in range(len(asks))]
    taken_over = tuple(Arrival(ask, num_known=count) for ask, count in enumerate(known))
    by_chance = _random(asks, answers, rng)
    # In company of the others, most steps have to be waited for.
    free = tuple(Arrival(index) for index, ask in enumerate(asks) if ask.kind in _NEVER_WAITED_FOR)
    return [
        Play((free,), {"one_ahead": True, "has_graphs": True, "max_num_seqs": 11}),
        _preempted(asks, one_ahead=True),
        Play((taken_over,), {"max_num_batched_tokens": 32, "max_num_seqs": 8, "one_ahead": True}),
        replace(by_chance, settings={**by_chance.settings, "one_ahead": True}),
    ]


def _random(asks: Sequence[Ask], answers: Answers, rng: random.Random) -> Play:
    """Everything at once, by chance."""
    rounds = tuple(
        tuple(
            _random_arrival(rng.randrange(len(asks)), answers, rng)
            for _ in range(rng.randint(1, 2 * len(asks)))
        )
        for _ in range(rng.randint(1, 2))
    )
    block_size = rng.choice((1, 2, 4, 8, 16, 32))
    longest = max(len(ask.prompt) + ask.sampling.max_tokens for ask in asks)
    max_num_seqs = rng.randint(1, 12)
    settings = {
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + rng.choice((0, 1, 5, 16, 100, 500)),
        "enable_prefix_caching": rng.random() < 0.8,
        "attention_backend": rng.choice(available_backends()),
        "reserve": rng.choice(("expected", "expected", "worst")),
    }
    return Play(rounds, settings, -(-longest // block_size) + rng.randint(0, 64 // block_size + 4))


OPTIONS: dict[str, Option] = {
    "together": lambda asks, answers, rng: [_together(asks)],
    "any order, staggered": lambda asks, answers, rng: [_shuffled(asks, rng) for _ in range(2)],
    "chunks of 1": lambda asks, answers, rng: [_one_token_a_step(asks, rng)],
    "chunks of 7": _chunks(7, 5),
    "chunks of 16": _chunks(16, 8),
    "2 at a time": lambda asks, answers, rng: [_together(asks, max_num_seqs=2)],
    "5 at a time": lambda asks, answers, rng: [_together(asks, max_num_seqs=5)],
    "blocks of 1": lambda asks, answers, rng: [_together(asks, block_size=1)],
    "blocks of 4": lambda asks, answers, rng: [_together(asks, block_size=4)],
    "blocks of 64": lambda asks, answers, rng: [_together(asks, block_size=64)],
    "no cache": lambda asks, answers, rng: [_together(asks, enable_prefix_caching=False)],
    "warm cache": lambda asks, answers, rng: [_warm(asks, block_size=SMALL_BLOCK)],
    "warm cache, chunks of 16": lambda asks, answers, rng: [
        _warm(asks, block_size=SMALL_BLOCK, max_num_batched_tokens=16, max_num_seqs=8)
    ],
    "tenants": lambda asks, answers, rng: [_tenants(asks)],
    "preempted": lambda asks, answers, rng: [_preempted(asks)],
    "preempted, no cache": lambda asks, answers, rng: [
        _preempted(asks, enable_prefix_caching=False)
    ],
    "never preempted": lambda asks, answers, rng: [
        Play((_all(asks),), {**TIGHT, "reserve": "worst"}, tight_pool(asks))
    ],
    "priorities": lambda asks, answers, rng: [_with_priorities(asks, rng)],
    **{f"neighbour dropped {moment.value}": _aborted(moment) for moment in Moment},
    "taken over": _taken_over,
    "taken over at every offset": _taken_over_everywhere,
    "reference attention": lambda asks, answers, rng: [
        _together(asks, attention_backend="reference")
    ],
    "reference attention, preempted": lambda asks, answers, rng: [
        _preempted(asks, attention_backend="reference", max_num_batched_tokens=16)
    ],
    "one ahead": _one_ahead,
    "decodes from graphs": lambda asks, answers, rng: [
        _together(asks, has_graphs=True, max_num_seqs=7),
        _preempted(asks, has_graphs=True),
    ],
    "everything by chance": lambda asks, answers, rng: [_random(asks, answers, rng)],
}
# Those that leave something to chance, so that it is worth to run them again.
BY_CHANCE = frozenset(
    {
        "any order, staggered",
        "chunks of 1",
        "priorities",
        "taken over",
        "taken over at every offset",
        "one ahead",
        "everything by chance",
    }
)

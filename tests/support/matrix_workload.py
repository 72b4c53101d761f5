"""The requests of the matrix: every way of sampling, over prompts that begin alike or not."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from headrace_worker.engine.messages import SamplingSpec
from support.matrix_grammar import FORM
from support.tiny_models import TINY_VOCAB_SIZE

STOP_IDS = tuple(range(5, TINY_VOCAB_SIZE, 9))  # so many that some answers end early
# Every fourth token, and each even one followed by the next.
BAD_WORDS = (*((i,) for i in range(3, TINY_VOCAB_SIZE, 4)), *((i, i + 1) for i in range(4, 300, 2)))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p": {"top_p": 0.9},
    "top-k": {"temperature": 1.3, "top_k": 12},
    "min-p": {"min_p": 0.2},
    "all filters": {"temperature": 1.1, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
    "penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "penalties, drawn": {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "top_p": 0.7},
    "bias": {"temperature": 0.7, "logit_bias": ((7, 3.0), (90, 2.0), (211, -50.0))},
    "stops": {"stop_token_ids": STOP_IDS, "min_tokens": 4},
    "bad words": {"temperature": 0.3, "bad_words": BAD_WORDS},
    "form": {"temperature": 0.9, "grammar": FORM},
    "scored prompt": {"temperature": 0.0, "prompt_logprobs": 3},
}
NUM_CHOICES = 3  # of the request with n > 1: as many requests with one prompt, seed + index
OTHER_BEGINNING = 8  # tokens, whole blocks
_SHARED = (1.0, 0.5)  # how much of the longest prompt two other greedy requests begin with


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as the engine gets it."""

    kind: str  # of KINDS, or "n"
    prompt: tuple[int, ...]
    sampling: SamplingSpec


@dataclass(frozen=True, slots=True)
class Size:
    """How large a workload is."""

    num_tokens: int  # most tokens of an answer
    longest_prompt: int  # tokens


SMALL = Size(num_tokens=12, longest_prompt=48)
FULL = Size(num_tokens=40, longest_prompt=150)


def make_workload(seed: int, size: Size) -> tuple[Ask, ...]:
    """Return requests of every kind, one of them with n > 1.

    The first four are greedy: three begin alike, and the fourth only goes on like the first, block
    for block, behind another beginning.
    """
    rng = random.Random(seed)
    longest = _prompt(rng, size.longest_prompt)
    shared = [longest[: int(size.longest_prompt * part)] + _prompt(rng, 5) for part in _SHARED]
    behind = _prompt(rng, OTHER_BEGINNING) + longest[OTHER_BEGINNING:]
    asks = [_ask("greedy", prompt, rng, size) for prompt in (longest, *shared, behind)]
    for kind in KINDS:
        asks.append(_ask(kind, _prompt(rng, rng.randint(2, size.longest_prompt)), rng, size))
    first = _ask("temperature", _prompt(rng, size.longest_prompt // 2), rng, size)
    for index in range(NUM_CHOICES):
        spec = _spec("temperature", first.sampling.seed + index, size)
        asks.append(Ask("n", first.prompt, spec))
    return tuple(asks)


def _ask(kind: str, prompt: tuple[int, ...], rng: random.Random, size: Size) -> Ask:
    return Ask(kind, prompt, _spec(kind, rng.getrandbits(63), size))


def _spec(kind: str, seed: int, size: Size) -> SamplingSpec:
    return SamplingSpec(max_tokens=size.num_tokens, seed=seed, **KINDS[kind])


def _prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, TINY_VOCAB_SIZE) for _ in range(length))

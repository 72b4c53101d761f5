"""The play by dice: a schedule a seed, without hypothesis, for as many as there is time for."""

from __future__ import annotations

from random import Random
from typing import Any

from headrace_worker.engine.settings import Reserve
from support.oracle import request
from support.oracle_limits import Limits, Tally
from support.oracle_play import Play
from support.oracle_requests import POISON, PRIORITIES, SALTS, STEMS, WISHES


def play_schedule(seed: int, tally: Tally, *, is_fast: bool = True) -> None:
    """Play the schedule of this seed to its end; raises AssertionError for whatever is wrong."""
    dice = Random(seed)
    limits = _draw_limits(dice, is_fast)
    try:
        play = Play(limits, tally)
        for _ in range(dice.randint(2, 12)):
            _act(play, dice)
        play.drain()
    except Exception as error:
        error.add_note(f"play_schedule({seed}, Tally(), is_fast={is_fast}) with {limits}")
        raise


def _act(play: Play, dice: Random) -> None:
    which = dice.randrange(100)
    match dice.choice(("add", "add", "steps", "steps", "rare") if play.num_ids else ("add",)):
        case "add":
            _add(play, dice)
        case "steps":
            for _ in range(dice.randint(1, 8)):
                play.step()
        case _:
            dice.choice(
                (
                    lambda: play.abort(which),
                    lambda: play.abort(which),
                    lambda: play.reprioritise(which, dice.choice(PRIORITIES)),
                    lambda: play.take_over(which, dice.randint(1, 20)),
                    lambda: play.fail_a_step(which, dice.random() < 0.5),
                    lambda: play.add_again(which),
                    play.run_out_of_memory,
                )
            )()


def _add(play: Play, dice: Random) -> None:
    """A request for some answers: the same prompt, with seeds that follow each other."""
    stem = dice.choice(STEMS)[: dice.choice((0, 8, 16, dice.randint(0, 24)))]
    own = [dice.randrange(64) for _ in range(dice.randint(1, 6))]
    prompt = [*stem, *own][: play.limits.context - 1]
    seed, priority, salt = dice.getrandbits(64), dice.choice(PRIORITIES), dice.choice(SALTS)
    options: dict[str, Any] = {**dice.choice(WISHES), **dice.choice(WISHES)}
    options["max_tokens"] = dice.randint(1, dice.choice((4, 16, 16, 30)))
    for index in range(dice.choice((1, 1, 2, 3))):
        options["seed"] = (seed + index) % 2**64
        play.add(request(0, prompt, priority=priority, salt=salt, **options))


def _draw_limits(dice: Random, is_fast: bool) -> Limits:
    block_size = dice.choice((1, 2, 4, 4, 16))
    return Limits(
        num_blocks=dice.choice((24, 32, dice.randint(24, 128))) // block_size,
        block_size=block_size,
        max_model_len=dice.choice((32, 64)),
        max_num_seqs=dice.randint(1, 8),
        budget=dice.choice((dice.randint(1, 8), dice.randint(8, 32))),
        reserve=dice.choice((Reserve.EXPECTED, Reserve.EXPECTED, Reserve.WORST)),
        caching=dice.random() < 0.8,
        poison=dice.choice((None, None, POISON)),
        is_hopeful=dice.random() < 0.8,
        is_fast=is_fast,
        has_graphs=dice.random() < 0.5,
        is_ahead=dice.random() < 0.5,
    )

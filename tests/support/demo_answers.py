"""Many real prompts through SmolLM2 under pressure, and transformers' verdict on every token."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.settings import EngineSettings
from support.demo_model import chat_prompt_ids, demo_model_path, questions
from support.matrix_compare import Tally
from support.oracle import Answers, request, run
from support.packed import greedy_by_transformers
from support.textbook_sampler import NEAR

DATA = Path(__file__).parents[1] / "data" / "prompts.toml"
BLOCK_SIZE = 16  # tokens
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4  # keys and values, layers, KV heads, head size, float32
LOGPROB_TOLERANCE = 1e-3  # thirty layers add up more rounding than the tiny models' two
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked at once, and how little room there is for it."""

    num_prompts: int
    num_tokens: int  # of each answer
    num_blocks: int  # of the pool
    max_num_seqs: int
    max_num_batched_tokens: int


def demo_prompts(num_prompts: int) -> list[list[int]]:
    """Return the first of the 64 prompts, in the chat template's words, long and short mixed."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    texts: dict[str, str] = data["texts"]
    asked = ["\n".join((texts.get(one.get("text"), ""), one["ask"])) for one in data["prompts"]]
    contents = [text.strip() for text in (*asked, *questions())]
    random.Random(0).shuffle(contents)
    return chat_prompt_ids(*contents[:num_prompts])


def answer_greedily(prompts: Prompts, load: Load) -> Answers:
    """Ask all prompts at once of an engine with a prefix cache and a pool of so many blocks."""
    engine, _ = load_engine(
        EngineSettings(
            model=str(demo_model_path()),
            device="cpu",
            dtype="float32",
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.max_num_batched_tokens,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=(load.num_blocks + 1) * BLOCK_SIZE * KV_BYTES_PER_TOKEN,
        )
    )
    commands = (
        request(seq_id, list(prompt), max_tokens=load.num_tokens, logprobs=1)
        for seq_id, prompt in enumerate(prompts)
    )
    return run(engine, *commands, max_steps=100_000)


def judge_by_forward(model: Any, prompts: Prompts, answers: Answers) -> Tally:
    """Hold each answer against one forward of transformers over prompt and answer.

    If the most likely token at every place is the one that was said, the answer is that of greedy
    ``generate``, by induction: its first token is, and behind equal tokens the next one is, too.
    One by one, because padding would round differently.
    """
    tally = Tally()
    for seq_id, prompt in enumerate(prompts):
        token_ids = answers.tokens[seq_id]
        logits = _logits_before(model, prompt, token_ids)  # [len(token_ids), vocab]
        logprobs = torch.tensor([token.logprob for token in answers.sampled[seq_id]])
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        difference = (logprobs - wanted).abs().max().item()
        tally.max_logit_difference = max(tally.max_logit_difference, difference)
        if not difference <= LOGPROB_TOLERANCE:
            tally.failures.append(f"prompt {seq_id}: a log-probability is {difference:.1e} off")
        _compare(f"prompt {seq_id}", token_ids, logits.argmax(-1).tolist(), logits, tally)
    return tally


def judge_by_generate(model: Any, prompts: Prompts, answers: Answers) -> Tally:
    """Hold each answer against ``transformers.generate``, prompt by prompt."""
    tally = Tally()
    for seq_id, prompt in enumerate(prompts):
        token_ids = answers.tokens[seq_id]
        wanted = greedy_by_transformers(model, prompt, len(token_ids))
        logits = _logits_before(model, prompt, wanted)
        _compare(f"prompt {seq_id}", token_ids, wanted, logits, tally)
    return tally


def _logits_before(model: Any, prompt: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits before each of the tokens, ``[len(token_ids), vocab]``."""
    whole = torch.tensor([[*prompt, *token_ids[:-1]]])
    with torch.no_grad():
        logits: torch.Tensor = model(whole, logits_to_keep=len(token_ids)).logits[0]
    return logits.float()


def _compare(
    label: str, told: Sequence[int], wanted: Sequence[int], logits: torch.Tensor, tally: Tally
) -> None:
    """Compare up to the first mismatch; a near-tie of the reference's own top two excuses it."""
    tally.num_sequences += 1
    for place, (token_id, other) in enumerate(zip(told, wanted, strict=False)):
        tally.num_ids += 1
        if token_id != other:
            row = logits[place]
            gap = (row.max() - row[[token_id, other]].min()).item()
            verdict = f"{label}, token {place}: {token_id} for {other}, {gap:.1e} apart"
            (tally.near_ties if gap < NEAR else tally.failures).append(verdict)
            return
        tally.num_identical += 1
    if len(told) != len(wanted):
        tally.failures.append(f"{label}: {len(told)} tokens, not {len(wanted)}")

"""What eight bits cost in quality: perplexity of our own documents, and agreement with bfloat16.

``python -m benchmarks.quality`` prints a table. Perplexity is over windows of 512 tokens; greedy
answers to the demo's questions are compared up to the first token that differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from headrace_worker.catalogue import MODELS, model_file
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.messages import AddSequence, SamplingSpec
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.serving.chat import Chat
from headrace_worker.serving.tokenizer import Tokenizer
from headrace_worker.serving.tokenizer_store import load_tokenizer

_ROOT = Path(__file__).parents[1]
_TEXTS = ("docs/architecture.md", "docs/reliability.md")
_WINDOW = 512  # tokens
_NUM_WINDOWS = 4
_ANSWER = 64  # tokens


@dataclass(frozen=True, slots=True)
class Quality:
    """How a model does in one number format."""

    perplexity: float
    answers: tuple[tuple[int, ...], ...]  # greedy, one for each question


def main() -> None:
    """Measure both formats and print how they differ."""
    path = model_file(MODELS["smollm2-135m"])
    tokenizer = load_tokenizer(path)
    plain, small = (_measure(path, tokenizer, kind) for kind in ("none", "int8"))
    agreed = [_common(*pair) for pair in zip(plain.answers, small.answers, strict=True)]
    same = sum(a == b for a, b in zip(plain.answers, small.answers, strict=True))
    print("| format | perplexity | answers as in bfloat16 | tokens before the first difference |")
    print("|---|---|---|---|")
    print(f"| bfloat16 | {plain.perplexity:.2f} | – | – |")
    print(
        f"| int8 | {small.perplexity:.2f} ({small.perplexity / plain.perplexity - 1:+.1%})"
        f" | {same} of {len(agreed)} | {sum(agreed) / len(agreed):.1f} of {_ANSWER} |"
    )


def _measure(path: Path, tokenizer: Tokenizer, quantization: str) -> Quality:
    settings = EngineSettings(
        model=str(path),
        device="cpu",
        dtype="bfloat16",
        quantization=quantization,
        kv_cache_memory_bytes=512 * 2**20,
    )
    engine, _ = load_engine(settings)
    return Quality(_perplexity(engine, tokenizer), _answers(engine, tokenizer))


def _perplexity(engine: Engine, tokenizer: Tokenizer) -> float:
    token_ids = tokenizer.encode_plain("\n".join((_ROOT / text).read_text() for text in _TEXTS))
    starts = range(0, _NUM_WINDOWS * _WINDOW, _WINDOW)
    spec = SamplingSpec(max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=0)
    windows = [
        AddSequence(start, tuple(token_ids[start : start + _WINDOW]), _WINDOW, spec)
        for start in starts
    ]
    losses = [-score for scores, _ in _play(engine, windows).values() for score in scores]
    return math.exp(sum(losses) / len(losses))


def _answers(engine: Engine, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    lines = (_ROOT / "examples" / "prompts.jsonl").read_text().splitlines()
    spec = SamplingSpec(max_tokens=_ANSWER, temperature=0.0, seed=0)
    commands = []
    for number, line in enumerate(lines):
        chat = Chat(json.loads(line)["body"]["messages"])
        prompt = tuple(tokenizer.encode_plain(tokenizer.render_chat(chat)))
        commands.append(AddSequence(number, prompt, len(prompt), spec))
    return tuple(tuple(tokens) for _, tokens in _play(engine, commands).values())


def _play(
    engine: Engine, commands: Sequence[AddSequence]
) -> dict[int, tuple[list[float], list[int]]]:
    """Run commands to their end; return each one's prompt scores and its new tokens."""
    told: dict[int, tuple[list[float], list[int]]] = {c.seq_id: ([], []) for c in commands}
    for command in commands:
        engine.add(command)
    while engine.has_work:
        outcome = engine.step()
        for scored in outcome.prompt_logprobs:
            told[scored.seq_id][0].extend(score.logprob for score in scored.scores)
        for token in outcome.tokens:
            told[token.seq_id][1].append(token.token_id)
    return told


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens agree before the first that does not."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=True)))


if __name__ == "__main__":
    main()

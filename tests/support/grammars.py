"""Grammars over the oracle's 64 tokens: their texts, and engines that wait for them to compile."""

from __future__ import annotations

import json
import select
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.grammar import GrammarTokens
from headrace_worker.engine.grammar_compiler import GrammarCompiler
from headrace_worker.engine.messages import AddSequence
from support.oracle import VOCAB_SIZE, Answers, OracleDecoder, make_engine, request

END, EOS_ID = "</s>", 0
WORDS = ("ab", "abc", "tr", "tru", "true", '":', '",', '{"', '"}', "12")
SINGLES = '{}[]":,-. 0123456789abcdefghijklmnopqrstuvwxyz'
TOKENS = [END, *SINGLES, *WORDS, "ü", "zz", "the", "in", "ing", "st", "ou"][:VOCAB_SIZE]
GRAMMAR_TIMEOUT_S = 30.0  # nobody waits so long


def schema_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar of JSON that follows a schema."""
    return str(LLMatcher.grammar_from_json_schema(schema))


def regex_grammar(regex: str) -> str:
    """Return the grammar of texts that match as a whole."""
    return str(LLMatcher.grammar_from_regex(regex))


def choice_grammar(*choices: str) -> str:
    """Return the grammar of one text out of several."""
    return str(LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, choices))}"))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "wise": {"type": "boolean"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def save_tokenizer(file: Path) -> Path:
    """Write the oracle's tokens as byte-level BPE."""
    spelled = [token if token == END else _spell(token) for token in TOKENS]
    vocab = {token: token_id for token_id, token in enumerate(spelled)}
    merges = [
        (word[:end], word[end])
        for word in map(_spell, WORDS)
        for end in range(1, len(word))
        if word[: end + 1] in vocab
    ]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.save(str(file))
    return file


@cache
def oracle_tokens() -> GrammarTokens:
    """Return the oracle's tokens as grammars see them."""
    with tempfile.TemporaryDirectory() as folder:
        file = save_tokenizer(Path(folder) / "tokenizer.json")
        return GrammarTokens.load(str(file), [EOS_ID], num_threads=1)


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text of an output, without its end."""
    return "".join(TOKENS[token_id] for token_id in token_ids if token_id != EOS_ID)


def make_grammar_engine(
    *,
    load_tokens: Callable[[], GrammarTokens] = oracle_tokens,
    compile_timeout_s: float = GRAMMAR_TIMEOUT_S,
    **options: Any,
) -> Engine:
    """Build an engine over the oracle that takes grammars; it likes to come to an end."""
    likes = {TOKENS.index(token): 2.0 for token in '"}'}
    engine = make_engine(**{"decoder": OracleDecoder(bias=likes), **options})
    engine.grammars = GrammarCompiler(load_tokens, compile_timeout_s=compile_timeout_s)
    return engine


def run_grammars(engine: Engine, *commands: AddSequence, answers: Answers | None = None) -> Answers:
    """Add, then step until nothing is left to run or to compile."""
    for command in commands:
        engine.add(command)
    answers = answers or Answers()
    while wait_for_work(engine):
        answers.take(engine.step())
        engine.scheduler.pool.check_integrity()
    return answers


def wait_for_work(engine: Engine) -> bool:
    """Return when there is something to step, or False when there never will be."""
    assert engine.grammars is not None
    engine.take_grammars()
    while not engine.has_work and engine.grammars.is_waited_for:
        readable, _, _ = select.select([engine.grammars], [], [], GRAMMAR_TIMEOUT_S)
        assert readable, "a compile never ended"
        engine.take_grammars()
    return engine.has_work


REGEX = r"(true|[0-9]{2,4}) [a-f]+(-[a-z]{1,3})?\."
CHOICES = ("abc", "ab", "the true thing", "12")
GRAMMARS = {
    "schema": schema_grammar(PERSON),
    "object": schema_grammar({"type": "object"}),
    "regex": regex_grammar(REGEX),
    "choice": choice_grammar(*CHOICES),
}


def ask(seq_id: int, kind: str, **options: Any) -> AddSequence:
    """Return a request with a grammar, and a prompt and draws of its own."""
    prompt = [1 + (seq_id * 7 + i) % 60 for i in range(2 + seq_id % 5)]
    sampling = {"max_tokens": 90, "temperature": 1.0, **options}
    return request(seq_id, prompt, grammar=GRAMMARS[kind], **sampling)


def roomy(**options: Any) -> Engine:
    """Return an engine where nobody has to wait or to leave."""
    return make_grammar_engine(num_blocks=512, max_num_batched_tokens=256, **options)


@cache
def alone(kind: str, seq_id: int) -> tuple[int, ...]:
    """Return the output of ``ask`` with nobody else in the engine."""
    return tuple(run_grammars(roomy(), ask(seq_id, kind)).tokens[seq_id])


def everything_is_free(engine: Engine) -> bool:
    """Whether no block is held and nothing is to be done."""
    pool = engine.scheduler.pool
    return pool.num_free == pool.num_blocks and not engine.has_work


def _spell(token: str) -> str:
    return token.encode().decode("latin-1").replace(" ", "Ġ")

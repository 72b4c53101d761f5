"""How far one output has come in its grammar: which token may come next, and whether it is over.

A state is a pure function of the output's tokens. So a preempted sequence keeps it, and a worker
that takes over makes it again from what was emitted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_WORD_BYTES = 4  # masks are whole words of 32 bits
_MAX_LEXER_STATES = 50_000  # of one compile and all its outputs; each takes 1 to 2 kB
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_EXPLAINED = {"NoExtensionBias": "no token of this model fits"}


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """A model's tokens as grammars see them; read by any number of threads."""

    tokenizer: LLTokenizer
    executor: LLExecutor  # computes several masks at once
    eos_token_ids: frozenset[int]  # allowed exactly where the grammar may end
    eos_mask: bytes  # the mask of a grammar that is complete

    @classmethod
    def load(
        cls, file: str, eos_token_ids: ReadOnlyList[int], num_threads: int | None = None
    ) -> GrammarTokens:
        """Read a ``tokenizer.json``; takes a good part of a second.

        Without end-of-sequence ids, the file's own end token is taken. Raises ValueError for a
        tokenizer that cannot be read as tokens with known bytes.
        """
        from llguidance import LLExecutor, LLTokenizer

        tokenizer = LLTokenizer(file, eos_token=list(eos_token_ids) or None)
        ends = frozenset(tokenizer.eos_tokens)
        return cls(tokenizer, LLExecutor(num_threads), ends, _pack(ends, tokenizer.vocab_size))

    @property
    def num_mask_bytes(self) -> int:
        """Size of a mask: one bit for each token id, the lowest bit of a byte first."""
        return len(self.eos_mask)

    def compile(self, grammar: str) -> LLMatcher:
        """Return the matcher of a grammar at its start; raises ValueError for an invalid one."""
        from llguidance import LLMatcher, LLParserLimits

        # Terse, because its messages go to the request, and the long form quotes its output.
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=_MAX_LEXER_STATES)
        matcher = LLMatcher(self.tokenizer, _without_forcing(grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # its tables are made by the first use, and copied from then
        if matcher.is_error():
            raise ValueError(explain(matcher))
        return matcher


class GrammarState:
    """One sequence's place in its grammar; touched by the engine's thread alone."""

    __slots__ = ("is_complete", "mask", "matcher", "tokens")

    def __init__(self, tokens: GrammarTokens, matcher: LLMatcher) -> None:
        self.tokens = tokens
        self.matcher = matcher
        self.mask: bytes | None = None  # of the next token, where it is known already
        self.is_complete = self._find_complete()  # nothing but an end of sequence may follow

    @property
    def error(self) -> str | None:
        """Why it cannot go on: a limit of the library, or no token of the model fits."""
        return explain(self.matcher) if self.matcher.is_error() else None

    def accept(self, token_id: int) -> bool:
        """Go on by one token; returns False, and is of no more use, when it does not fit."""
        if not self.matcher.consume_token(token_id):
            return False
        self.mask = None
        self.is_complete = self._find_complete()
        return True

    def _find_complete(self) -> bool:
        """Where the grammar may end but has not by itself, only the mask tells if it may go on."""
        if self.matcher.is_stopped():
            return not self.matcher.is_error()
        if not self.matcher.is_accepting():
            return False
        # The library may add a word: it has a bit more than there are tokens.
        self.mask = self.matcher.compute_bitmask()[: self.tokens.num_mask_bytes]
        # One that fails over it allows the end alone.
        return self.mask == self.tokens.eos_mask and not self.matcher.is_error()


def explain(matcher: LLMatcher) -> str:
    """Return in one line what is wrong with a matcher that has an error."""
    error = matcher.get_error().removesuffix("<non-verbose/>")
    return _EXPLAINED.get(error.strip()) or " ".join(error.split())


def _without_forcing(grammar: str) -> str:
    """Let any token come whose bytes fit, also where the grammar leaves only one text.

    By itself the library would ask there for the tokens that its tokenizer makes of the text. They
    need not have its bytes, after a normalizer, and for a long text it takes as long every time.
    """
    if not grammar.lstrip().startswith("{"):
        return _NO_FORCING + grammar
    top = json.loads(grammar)
    for part in top["grammars"]:
        schema = part.pop("json_schema", None)
        rules = part.get("lark_grammar") if schema is None else f"start: %json {json.dumps(schema)}"
        part["lark_grammar"] = _NO_FORCING + rules
    return json.dumps(top)


def _pack(token_ids: frozenset[int], vocab_size: int) -> bytes:
    mask = bytearray(-(-vocab_size // (8 * _WORD_BYTES)) * _WORD_BYTES)
    for token_id in token_ids:
        mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)

"""The grammar of the matrix, and which tokens it takes next, found from its start each time."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_worker.engine.grammar import GrammarTokens
from support.grammars import regex_grammar
from support.tiny_models import CHAT_END_ID, build_tiny_tokenizer

FORM = regex_grammar(r"(yes|no|perhaps): [a-z ]{3,12}(,[0-9]{1,3}){1,4}\.")


def allowed_tokens(grammar: str, output: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return for each token id whether it may follow this output."""
    tokens = _tiny_tokens()
    matcher = tokens.compile(grammar)
    assert matcher.consume_tokens(list(output)), f"{output} does not fit the grammar"
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(mask, bitorder="little").astype(np.bool_)


@cache
def _tiny_tokens() -> GrammarTokens:
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_tokenizer().save_pretrained(folder)
        file = Path(folder) / "tokenizer.json"
        return GrammarTokens.load(str(file), [CHAT_END_ID], num_threads=1)

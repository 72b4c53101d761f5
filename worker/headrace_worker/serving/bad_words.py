"""Bad words as the engine knows them: every run of token ids that spells one.

A word stands behind a space or not, and models have tokens for both; so each word becomes several
runs. Only exact spellings count: a run is a way in which this tokenizer itself writes the word, or
one token that is the word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headrace.checks import shown
from headrace.errors import InvalidRequest
from headrace_worker.serving.tokenizer import Tokenizer

MAX_RUN_IDS = 16_384  # of all runs of a request together
_ANCHOR = "\n"  # what follows it begins no text, which SentencePiece spells differently


def spell_words(
    words: Sequence[str],  # none of them empty
    tokenizer: Tokenizer,
    vocab_size: int,  # rows of the model's head: ids from here on are never sampled
) -> tuple[tuple[int, ...], ...]:
    """Return the runs of all words, each once.

    Raises InvalidRequest for a word that the tokenizer cannot spell, and for too many runs.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        spellings = _spell(word, tokenizer)
        found.update((run, None) for run in spellings if max(run) < vocab_size)
    # One that ends with another is banned with it.
    runs = tuple(run for run in found if not any(run[i:] in found for i in range(1, len(run))))
    num_ids = sum(map(len, runs))
    if num_ids > MAX_RUN_IDS:
        raise InvalidRequest(
            f"bad_words are spelled with {num_ids} token ids, at most {MAX_RUN_IDS} are taken"
        )
    return runs


def _spell(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    bare = word.lstrip(" ")
    if not bare:
        raise InvalidRequest(
            f"bad_words holds {shown(word)}, which is nothing but spaces: words are matched with a"
            " space before them and without, so nothing is left of it to ban"
        )
    meant = bare.encode()
    found = [
        run
        for run in _candidates(bare, tokenizer)
        if run and tokenizer.shown_bytes(run).lstrip(b" ") == meant
    ]
    if not found:
        raise InvalidRequest(
            f"bad_words holds {shown(word)}, which this model's tokens cannot spell"
        )
    return found


def _candidates(bare: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    yield tokenizer.encode_plain(bare)
    yield tokenizer.encode_plain(f" {bare}")
    anchor, anchored = map(tokenizer.encode_plain, (_ANCHOR, _ANCHOR + bare))
    if anchored[: len(anchor)] == anchor:
        yield anchored[len(anchor) :]
    yield from _singles((bare, f" {bare}"), tokenizer)


def _singles(spellings: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    for spelling in spellings:
        for token_id in tokenizer.tokens_of(spelling.encode()):
            yield (token_id,)

"""Tokenizers: text to ids as the model's files say."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from headrace.errors import ConfigurationError
from headrace_worker.serving.token_bytes import token_decoder
from headrace_worker.serving.tokenizer import Tokenizer, TokenizerConfig
from support.tokenizers import (
    BOS,
    BOS_ID,
    CONFIG,
    EOS_ID,
    PAD_ID,
    byte_level_backend,
    byte_level_tokenizer,
    sentence_piece_backend,
    sentence_piece_tokenizer,
)

BYTE_LEVEL = byte_level_tokenizer()
SENTENCE_PIECE = sentence_piece_tokenizer()
TEXTS = (
    "",
    "a",
    " a",
    "a ",
    "\n",
    "  two  spaces",
    "Hello world",
    "<pad>text",
    "客单价 🌶 é",
    "\t\0",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("backend", [byte_level_backend(), sentence_piece_backend(prefix=False)])
def test_text_survives_encoding(backend: Backend, text: str) -> None:
    """B09: no space is added or lost, also next to a special token."""
    ids = backend.encode(text, add_special_tokens=False).ids
    assert backend.decode(ids, skip_special_tokens=False) == text


@given(st.text(max_size=30))
def test_output_text_is_the_library_s_with_its_first_space(text: str) -> None:
    """SentencePiece's library strips the first space of a text; an output keeps it."""
    ids = SENTENCE_PIECE.encode(text)
    expected = sentence_piece_backend().decode(ids, skip_special_tokens=True)
    assert SENTENCE_PIECE.decode(ids).removeprefix(" ") == expected.removeprefix(" ")


def test_raw_text_begins_as_the_model_wants_it() -> None:
    """Special tokens are added where the tokenizer's files say so, and only there."""
    assert SENTENCE_PIECE.encode("Hello")[0] == BOS_ID
    assert BOS_ID not in BYTE_LEVEL.encode("Hello")


def test_text_with_its_own_beginning_gets_no_second_one() -> None:
    """A prompt that a template rendered elsewhere keeps exactly one BOS."""
    ids = SENTENCE_PIECE.encode(BOS + "Hello")
    assert ids == SENTENCE_PIECE.encode("Hello") or ids[0] == BOS_ID != ids[1]
    assert ids.count(BOS_ID) == 1


def test_ids_are_known_by_their_kind() -> None:
    """Special tokens have no bytes; the vocabulary ends after the highest id."""
    assert [BYTE_LEVEL.is_special(i) for i in (BOS_ID, EOS_ID, PAD_ID, 3)] == [True] * 3 + [False]
    assert BYTE_LEVEL.token_bytes(EOS_ID) == b""
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab_size) == b""
    assert BYTE_LEVEL.vocab_size == byte_level_backend().get_vocab_size()
    assert (BYTE_LEVEL.bos_token_id, BYTE_LEVEL.eos_token_ids) == (BOS_ID, frozenset({EOS_ID}))


def test_truncation_and_padding_of_the_files_are_off() -> None:
    """A tokenizer saved with truncation does not shorten prompts silently."""
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer(backend, CONFIG).encode("z" * 10)) == 10


def test_many_threads_share_one_tokenizer() -> None:
    """Encoding in threads gives what encoding in turn gives."""
    texts = [f"Hello world {n} 客" * 20 for n in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(SENTENCE_PIECE.encode, texts)) == [*map(SENTENCE_PIECE.encode, texts)]


def test_added_tokens_are_plain_text_in_byte_level_output() -> None:
    """An added token with a space or an accent, not in the byte alphabet, is its own text."""
    backend = byte_level_backend()
    backend.add_tokens(["<think> é"])
    tokenizer = Tokenizer(backend, CONFIG)
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "<think> é"


def test_words_without_a_decoder_are_spaced() -> None:
    """A tokenizer that declares no decoder joins its tokens with spaces, as the library does."""
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert Tokenizer(backend, TokenizerConfig()).decode([0, 1]) == " " + backend.decode([0, 1])


def test_a_metaspace_decoder_keeps_the_first_space() -> None:
    """The older spelling of SentencePiece's decoder gives the same bytes."""
    backend = Backend(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    backend.decoder = decoders.Metaspace()
    assert Tokenizer(backend, TokenizerConfig()).decode([0, 1]) == " a b"


def test_an_unknown_decoder_is_refused_by_name() -> None:
    """A kind of tokenizer that would come out wrong is refused at the start."""
    with pytest.raises(ConfigurationError, match="WordPiece"):
        token_decoder(json.loads(_state(decoders.WordPiece())))
    with pytest.raises(ConfigurationError, match="Regex"):
        token_decoder({"type": "Replace", "pattern": {"Regex": "x+"}, "content": ""})


def _state(decoder: decoders.Decoder) -> str:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoder
    return json.dumps(json.loads(backend.to_str())["decoder"])


def test_a_config_survives_being_written_down() -> None:
    """What the export writes is what the worker reads."""
    assert TokenizerConfig.from_json(CONFIG.to_json()) == CONFIG
    assert TokenizerConfig.from_json(TokenizerConfig().to_json()) == TokenizerConfig()

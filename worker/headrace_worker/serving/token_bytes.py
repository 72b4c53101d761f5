"""The bytes that a token stands for, read off the decoder that its tokenizer declares.

Two families cover what generates text. Byte-level BPE writes each byte as one printable character.
SentencePiece writes a space as "▁" and, where it has no piece for a character, its bytes as
``<0xE2>``. Their decoders run over whole outputs; here each token is decoded by itself, which gives
the same bytes, since neither lets one token change another's. Two things are left out on purpose:
the space that some strip at the start of a text, because output goes on after a prompt, and
replacing a whole run of byte tokens when one of them is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import ConfigurationError

TokenDecoder = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_decoder(declared: Mapping[str, Any] | None) -> TokenDecoder:
    """Return the function from a token's text to its bytes, given a tokenizer.json's decoder.

    Raises ConfigurationError for a kind of decoder that no text generator known to us uses.
    """
    if declared is None:
        return _spaced_words
    steps = declared["decoders"] if declared["type"] == "Sequence" else [declared]
    if any(step["type"] == "ByteLevel" for step in steps):
        return _byte_level
    return _sentence_piece(steps)


def _spaced_words(token: str) -> bytes:
    """Without a decoder, tokens are words with a space between them."""
    return f" {token}".encode()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()  # an added token, kept as plain text


def _sentence_piece(steps: list[Mapping[str, Any]]) -> TokenDecoder:
    replacements: list[tuple[str, str]] = []
    has_byte_tokens = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": str(replacement)}:
                replacements.append((replacement, " "))
            case {"type": "ByteFallback"}:
                has_byte_tokens = True
            case {"type": "Fuse" | "Strip"}:
                pass
            case _:
                raise ConfigurationError(f"tokenizers with the decoder {step} are not supported")

    def decode(token: str) -> bytes:
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return decode


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: a printable byte is itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_of_character()

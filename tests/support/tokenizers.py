"""Tokenizers built in memory: the two families that generate text, small enough to read."""

from __future__ import annotations

from dataclasses import replace

import tokenizers as library
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from headrace_worker.serving.tokenizer import Tokenizer, TokenizerConfig

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
WORDS = ("▁Hello", "▁world", "▁Say", "▁text", "客", "ABC", "DEF", "HI", "xyz")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONFIG = TokenizerConfig(
    chat_template=CHAT_TEMPLATE,
    special_tokens={"bos_token": BOS, "eos_token": EOS},
    bos_token_id=BOS_ID,
    eos_token_ids=frozenset({EOS_ID}),
)


def byte_level_backend(*, adds_bos: bool = False) -> library.Tokenizer:
    """Return byte-level BPE as GPT-2, Llama 3 and Qwen have it; every text and id list is valid."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _build(
        _bpe([BOS, EOS, PAD, *alphabet], ("ABC", "DEF", "HI", "xyz", "Ġtext"), byte_fallback=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        adds_bos=adds_bos,
    )


def sentence_piece_backend(*, adds_bos: bool = True, prefix: bool = True) -> library.Tokenizer:
    """Return BPE with spaces as "▁" and byte tokens.

    With ``prefix`` a text begins with a space of its own, which decoding strips, as in Llama 2 and
    Mistral; without, as in Gemma, it does not.
    """
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [chr(code) for code in range(0x21, 0x7F)]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _build(
        _bpe([BOS, EOS, PAD, *byte_tokens, "▁", *letters, "客"], WORDS, byte_fallback=True),
        pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False),
        decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps),
        adds_bos=adds_bos,
    )


def byte_level_tokenizer(**config: object) -> Tokenizer:
    """Return a tokenizer over byte_level_backend; keywords replace fields of CONFIG."""
    return Tokenizer(byte_level_backend(), replace(CONFIG, **config))  # type: ignore[arg-type]


def sentence_piece_tokenizer(**config: object) -> Tokenizer:
    """Return a tokenizer over sentence_piece_backend; keywords replace fields of CONFIG."""
    return Tokenizer(sentence_piece_backend(), replace(CONFIG, **config))  # type: ignore[arg-type]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return one token id for each byte, as of a model that spells its characters out."""
    singles = {
        tokenizer.token_bytes(token_id): token_id for token_id in reversed(range(3, 3 + 256))
    }
    return [singles[bytes([byte])] for byte in data]


def _bpe(tokens: list[str], words: tuple[str, ...], *, byte_fallback: bool) -> models.BPE:
    """Return BPE over the tokens that builds each word from left to right."""
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for word in words:
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            vocab.setdefault(word[: end + 1], len(vocab))
    return models.BPE(vocab, merges, byte_fallback=byte_fallback, unk_token=None)


def _build(
    model: models.BPE,
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    decoder: decoders.Decoder,
    *,
    adds_bos: bool,
) -> library.Tokenizer:
    backend = library.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (BOS, EOS, PAD)]
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
        )
    return backend

"""Text to token ids and back, and chats to prompts, as the model's own files say.

Immutable after it is made, and the library underneath lets any number of threads read it, so one
tokenizer serves all threads. torch is not imported: transformers brings it in only for what the
export process does (see tokenizer_export).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from headrace.errors import InvalidRequest
from headrace_worker.serving.chat import Chat, render_chat
from headrace_worker.serving.token_bytes import token_decoder

VOCABULARY_FILE = "tokenizer.json"
CONFIG_FILE = "headrace.json"
FORMAT_VERSION = 2  # of these two files


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What a model's files say about its tokens, beside the vocabulary itself."""

    chat_template: str | None = None  # Jinja source
    tool_template: str | None = None  # the same for chats with tools, where it is another
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # {"bos_token": "<s>", ...}
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()  # of tokenizer and generation config together

    def to_json(self) -> str:
        """Return what from_json reads."""
        return json.dumps(
            {
                "chat_template": self.chat_template,
                "tool_template": self.tool_template,
                "special_tokens": dict(self.special_tokens),
                "bos_token_id": self.bos_token_id,
                "eos_token_ids": sorted(self.eos_token_ids),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> TokenizerConfig:
        """Read what to_json wrote."""
        body = json.loads(text)
        return cls(**{**body, "eos_token_ids": frozenset(body["eos_token_ids"])})


class Tokenizer:
    """One model's tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._config = config
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        added = backend.get_added_tokens_decoder().items()
        self._special_ids = frozenset(token_id for token_id, token in added if token.special)
        self._decode_token = token_decoder(json.loads(backend.to_str())["decoder"])
        # Both are filled on demand, and equal whichever thread fills them.
        self._bytes: dict[int, bytes] = {}
        self._ids_of_bytes: dict[bytes, tuple[int, ...]] | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read what tokenizer_export wrote."""
        backend = tokenizers.Tokenizer.from_file(str(folder / VOCABULARY_FILE))
        return cls(backend, TokenizerConfig.from_json((folder / CONFIG_FILE).read_text("utf-8")))

    @property
    def vocab_size(self) -> int:
        """Number of ids: the highest known one plus one. The model's head may have more rows."""
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, where the model has one."""
        return self._config.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an output; models often have several."""
        return self._config.eos_token_ids

    def is_special(self, token_id: int) -> bool:
        """Whether the token controls the model and is no part of the text."""
        return token_id in self._special_ids

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of raw text, with the special tokens that the model begins texts with.

        Text that brings its own beginning-of-sequence token, as a prompt that a chat template
        rendered elsewhere does, does not get a second one.
        """
        token_ids = self._encode(text, add_special_tokens=True)
        bos = self.bos_token_id
        return token_ids[1:] if bos is not None and token_ids[:2] == (bos, bos) else token_ids

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Return the ids of text that needs no beginning: the midst of another, or a chat.

        A chat's template alone decides on special tokens, as in transformers.
        """
        return self._encode(text, add_special_tokens=False)

    def render_chat(self, chat: Chat) -> str:
        """Return the text that the chat template makes, ready for the assistant's next words.

        Raises InvalidRequest with the template's own message where it refuses.
        """
        template = self._config.chat_template
        if chat.tools:
            template = self._config.tool_template or template
        if template is None:
            raise InvalidRequest("this model has no chat template: send a prompt, not messages")
        return render_chat(template, self._config.special_tokens, chat)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the output: none for special and unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of an output; U+FFFD stands for bytes that are no character."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def show(self, token_ids: Iterable[int]) -> str:
        """Return the text of a prompt, its special tokens spelled out, as the library shows it."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def shown_bytes(self, token_ids: Iterable[int]) -> bytes:
        """Return the bytes of tokens, special ones spelled out; none for unknown ids."""
        return b"".join(
            (self._backend.id_to_token(token_id) or "").encode()
            if self.is_special(token_id)
            else self.token_bytes(token_id)
            for token_id in token_ids
        )

    def tokens_of(self, data: bytes) -> tuple[int, ...]:
        """Return the ids of all tokens that are exactly these bytes; slow for the first call."""
        if self._ids_of_bytes is None:
            ids: dict[bytes, tuple[int, ...]] = {}
            for token_id in range(self.vocab_size):
                if known := self.token_bytes(token_id):
                    ids[known] = (*ids.get(known, ()), token_id)
            self._ids_of_bytes = ids
        return self._ids_of_bytes.get(data, ())

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _look_up(self, token_id: int) -> bytes:
        token = None if self.is_special(token_id) else self._backend.id_to_token(token_id)
        return b"" if token is None else self._decode_token(token)

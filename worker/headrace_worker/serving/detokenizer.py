"""Tokens become text one at a time, byte for byte, and what was shown stays shown.

A token is a string of bytes, often not a whole character. Bytes wait until their character is
complete; what can no longer become one turns into U+FFFD. Text waits in turn while it may be the
beginning of a stop string::

    ids ─▶ bytes ─▶ characters (incomplete ones wait) ─▶ stop strings (beginnings wait) ─▶ text

All pieces and the tail joined are the text of all tokens. An echo of the prompt goes before the
first piece, past the stop strings. One thread owns a detokenizer.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection
from dataclasses import dataclass

from headrace_worker.serving.stop_strings import StopScanner


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added."""

    text: str  # may be empty
    stopped: bool  # a stop string is complete: the output is over, and ``text`` ends there


class Detokenizer:
    """Text of one output. A takeover makes it anew by appending the tokens that were emitted."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],  # empty for special tokens
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
        echo: str = "",
        silent_ids: Collection[int] = (),
    ) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # None: there is no stop string to look for, as most often.
        self._scanner = StopScanner(stop, include_stop=include_stop) if stop else None
        self._min_tokens = min_tokens  # no stop string counts that ends before this many tokens
        self._echo = echo  # text of the prompt, until the first token has taken it along
        self._silent_ids = silent_ids  # tokens that end the output without being part of its text
        self._num_tokens = 0
        self._stopped = False

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far."""
        return self._num_tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the output."""
        return self._stopped

    def append(self, token_id: int) -> Piece:
        """Take the next token; after a stop, tokens add nothing."""
        if self._stopped:
            return Piece("", stopped=True)
        self._num_tokens += 1
        is_silent = token_id in self._silent_ids
        text = self._decoder.decode(b"" if is_silent else self._token_bytes(token_id))
        if self._scanner is not None:
            scan = self._scanner.feed(text, may_stop=self._num_tokens >= self._min_tokens)
            text, self._stopped = scan.text, scan.matched
        if self._echo:
            text, self._echo = self._echo + text, ""
        return Piece(text, self._stopped)

    def finish(self) -> str:
        """Return what was held back, an echo that no token took along included.

        It is empty after a stop, and when asked again.
        """
        if self._stopped:
            return ""
        echo, self._echo = self._echo, ""
        tail = self._decoder.decode(b"", final=True)
        if self._scanner is not None:
            # No match is looked for here: a character that never completed is not what was meant.
            tail = self._scanner.feed(tail, may_stop=False).text + self._scanner.flush()
        return echo + tail

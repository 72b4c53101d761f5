"""One face for both clients, so that one suite of tests runs over AsyncClient and Client.

The blocking client works in threads; the tests are asyncio either way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, closing
from types import TracebackType
from typing import Any

from headrace import (
    AsyncClient,
    Chunk,
    Client,
    Completion,
    RequestState,
    RequestStatus,
    SyncTokenStream,
    TokenStream,
)

FLAVOURS = ("async", "sync")


class AnyClient:
    """A client of either flavour; arguments are those of the client itself."""

    def __init__(self, flavour: str, url: str, **settings: Any) -> None:
        self.flavour = flavour
        self._async = AsyncClient(url, **settings) if flavour == "async" else None
        self._sync = Client(url, **settings) if flavour == "sync" else None

    async def submit(self, *args: Any, **options: Any) -> str:
        """Do what the client's method of this name does, as all others here."""
        if self._async:
            return await self._async.submit(*args, **options)
        return await asyncio.to_thread(self._blocking.submit, *args, **options)

    async def generate(self, *args: Any, **options: Any) -> Completion:
        if self._async:
            return await self._async.generate(*args, **options)
        return await asyncio.to_thread(self._blocking.generate, *args, **options)

    def stream(self, *args: Any, **options: Any) -> AnyStream:
        if self._async:
            return AnyStream(self._async.stream(*args, **options))
        return AnyStream(self._blocking.stream(*args, **options))

    def attach(self, *args: Any, **options: Any) -> AnyStream:
        if self._async:
            return AnyStream(self._async.attach(*args, **options))
        return AnyStream(self._blocking.attach(*args, **options))

    async def generate_many(
        self, prompts: Iterable[Any], **options: Any
    ) -> AsyncGenerator[Any, None]:
        if self._async:
            async with aclosing(self._async.generate_many(prompts, **options)) as outcomes:
                async for outcome in outcomes:
                    yield outcome
            return
        with closing(self._blocking.generate_many(prompts, **options)) as blocking:
            while (outcome := await asyncio.to_thread(next, blocking, None)) is not None:
                yield outcome

    async def status(self, *args: Any, **options: Any) -> RequestStatus:
        if self._async:
            return await self._async.status(*args, **options)
        return await asyncio.to_thread(self._blocking.status, *args, **options)

    async def cancel(self, *args: Any, **options: Any) -> RequestState:
        if self._async:
            return await self._async.cancel(*args, **options)
        return await asyncio.to_thread(self._blocking.cancel, *args, **options)

    async def finish_now(self, *args: Any, **options: Any) -> RequestState:
        if self._async:
            return await self._async.finish_now(*args, **options)
        return await asyncio.to_thread(self._blocking.finish_now, *args, **options)

    async def reprioritise(self, *args: Any, **options: Any) -> RequestState:
        if self._async:
            return await self._async.reprioritise(*args, **options)
        return await asyncio.to_thread(self._blocking.reprioritise, *args, **options)

    async def close(self) -> None:
        if self._async:
            await self._async.aclose()
        else:
            self._blocking.close()

    @property
    def _blocking(self) -> Client:
        assert self._sync is not None
        return self._sync


class AnyStream:
    """A stream of either flavour."""

    def __init__(self, stream: TokenStream | SyncTokenStream) -> None:
        self._stream = stream

    @property
    def request_id(self) -> str:
        """Name of the request."""
        return self._stream.request_id

    @property
    def completion(self) -> Completion:
        """Result after the end."""
        return self._stream.completion

    async def read(self) -> Completion:
        """Read to the end."""
        if isinstance(self._stream, TokenStream):
            return await self._stream.read()
        return await asyncio.to_thread(self._stream.read)

    async def cancel(self) -> None:
        """Cancel the request."""
        if isinstance(self._stream, TokenStream):
            await self._stream.cancel()
        else:
            await asyncio.to_thread(self._stream.cancel)

    async def chunks(self) -> list[Chunk]:
        """Read to the end and return every chunk."""
        return [chunk async for chunk in self]

    async def __aenter__(self) -> AnyStream:
        if isinstance(self._stream, TokenStream):
            await self._stream.__aenter__()
        else:
            await asyncio.to_thread(self._stream.__enter__)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(self._stream, TokenStream):
            await self._stream.__aexit__(kind, error, trace)
        else:
            await asyncio.to_thread(self._stream.__exit__, kind, error, trace)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        if isinstance(self._stream, TokenStream):
            return aiter(self._stream)
        return _in_thread(iter(self._stream))


async def _in_thread(chunks: Iterator[Chunk]) -> AsyncIterator[Chunk]:
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk

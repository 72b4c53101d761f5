"""A FastAPI backend that streams an answer as server-sent events, and stops when the reader leaves.

    REDIS_URL=redis://localhost:6379/0 uvicorn --app-dir examples sse_server:app
    curl -N localhost:8000/chat -H 'content-type: application/json' -d '{"prompt": "Hello"}'

The stream is opened by a dependency, which FastAPI leaves after the response has ended, however it
ended. So a refusal is still an HTTP status, and a closed tab cancels the request.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from headrace import AsyncClient, HeadraceError, InvalidRequest, Overloaded, TokenStream


class Question(BaseModel):
    """The body of ``POST /chat``."""

    prompt: str
    max_tokens: int = 256
    temperature: float = 0.7


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep one client for the whole process: a thousand streams share its few connections."""
    url = os.environ.get("REDIS_URL", "redis://localhost:6379/0")
    max_queued = int(os.environ.get("MAX_QUEUED", "10000"))
    async with AsyncClient(url, max_queued=max_queued) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


async def answer(question: Question, request: Request) -> AsyncIterator[TokenStream]:
    """Enqueue the question and keep its stream open until the response is over."""
    client: AsyncClient = request.app.state.client
    async with client.stream(
        messages=[{"role": "user", "content": question.prompt}],
        max_tokens=question.max_tokens,
        temperature=question.temperature,
    ) as stream:
        yield stream


@app.post("/chat")
async def chat(stream: Annotated[TokenStream, Depends(answer)]) -> StreamingResponse:
    """Stream the answer: ``chunk`` events, then one ``done`` or ``error``."""
    return StreamingResponse(
        events(stream),
        media_type="text/event-stream",
        headers={"x-request-id": stream.request_id, "cache-control": "no-store"},
    )


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    """Say that the process serves."""
    return {"status": "ok"}


@app.exception_handler(InvalidRequest)
async def invalid(request: Request, error: InvalidRequest) -> JSONResponse:
    """Answer 400: the question itself is at fault."""
    return JSONResponse({"error": error.message}, 400)


@app.exception_handler(Overloaded)
async def overloaded(request: Request, error: Overloaded) -> JSONResponse:
    """Answer 503 and say when to come back."""
    seconds = max(1, round(error.retry_after_s))
    return JSONResponse({"error": error.message}, 503, headers={"retry-after": str(seconds)})


async def events(stream: TokenStream) -> AsyncIterator[str]:
    """Turn chunks into events. The id is the offset to go on from, so a reader can resume."""
    try:
        async for chunk in stream:
            yield event("chunk", {"text": chunk.text}, chunk.index + len(chunk.token_ids))
    except HeadraceError as error:  # the status line is out; the error must be an event
        yield event("error", {"error": str(error)})
    else:
        yield event("done", {"finish_reason": stream.completion.finish_reason})


def event(name: str, data: dict[str, str], offset: int | None = None) -> str:
    """Format one event; JSON keeps line breaks out of the data line."""
    head = "" if offset is None else f"id: {offset}\n"
    return f"{head}event: {name}\ndata: {json.dumps(data)}\n\n"

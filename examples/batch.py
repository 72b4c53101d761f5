"""Work through a file of questions, one a line, and write each answer as soon as it is there.

    python examples/batch.py questions.txt answers.jsonl

Run it again after a crash: lines that have an answer are skipped, and what was still in the queue
is picked up there, because a line always makes the same request id. For OpenAI's batch format,
which needs no program, see `headrace run-batch`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

from headrace import AsyncClient, Completion, HeadraceError, RequestError, RequestTimeout
from headrace.options import PromptWithOptions


def main() -> None:
    """Answer every line that has no answer yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--max-in-flight", type=int, default=64)
    parser.add_argument(
        "--redis-url", default=os.environ.get("REDIS_URL", "redis://localhost:6379/0")
    )
    asyncio.run(run(parser.parse_args()))


async def run(options: argparse.Namespace) -> None:
    """Keep ``max_in_flight`` requests going, and append results in the order they finish."""
    asked = questions(options.questions, finished(options.answers))
    with options.answers.open("a", encoding="utf-8") as out:
        async with AsyncClient(options.redis_url) as client:
            answers = client.generate_many(
                asked,
                max_in_flight=options.max_in_flight,
                max_tokens=128,
                temperature=0.2,
                return_errors=True,  # one bad line must not end the run
                cancel_on_exit=False,  # what is in the queue stays there for the next run
            )
            async for answer in answers:
                print(json.dumps(result_line(answer)), file=out, flush=True)


def questions(path: Path, done: set[str | None]) -> Iterator[PromptWithOptions]:
    """Read the questions that are still open, lazily: the file may be larger than memory."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            request_id = f"{path.stem}-{number}"
            if line.strip() and request_id not in done:
                messages = [{"role": "user", "content": line.strip()}]
                yield {"messages": messages, "request_id": request_id}


def finished(path: Path) -> set[str | None]:
    """Return the ids that have a result; a last line that a crash left unfinished is cut off."""
    if not path.exists():
        return set()
    head, newline, _ = path.read_bytes().rpartition(b"\n")
    os.truncate(path, len(head + newline))
    return {json.loads(line)["id"] for line in head.splitlines()}


def result_line(answer: Completion | RequestError | RequestTimeout) -> dict[str, str | None]:
    """Return one line of the output."""
    if isinstance(answer, HeadraceError):
        return {"id": answer.request_id, "error": str(answer)}
    return {"id": answer.request_id, "text": answer.text, "finish_reason": answer.finish_reason}


if __name__ == "__main__":
    main()

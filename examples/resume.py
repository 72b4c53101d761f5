"""Reconnect to a stream: keep what was read in a file, and go on behind it after a restart.

    python examples/resume.py order-42 order-42.jsonl

Stop it at any moment and run it again: the file ends up with every token once.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from headrace import Client


def main() -> None:
    """Read one request's chunks into a file of JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("request_id")
    parser.add_argument("path", type=Path)
    parser.add_argument(
        "--redis-url", default=os.environ.get("REDIS_URL", "redis://localhost:6379/0")
    )
    options = parser.parse_args()
    with Client(options.redis_url) as client:
        follow(client, options.request_id, options.path)


def follow(client: Client, request_id: str, path: Path) -> None:
    """Append the chunks that the file does not have yet; return when the answer is complete."""
    offset = repair(path)
    with client.attach(request_id, after=offset) as stream, path.open("a", encoding="utf-8") as out:
        for chunk in stream:
            line = {"index": chunk.index, "token_ids": chunk.token_ids, "text": chunk.text}
            print(json.dumps(line), file=out, flush=True)
            print(chunk.text, end="", flush=True)
    print()


def repair(path: Path) -> int:
    """Cut off a line that a crash left unfinished, and return the number of tokens before it."""
    if not path.exists():
        return 0
    whole = path.read_bytes().rpartition(b"\n")
    kept = whole[0] + whole[1]
    os.truncate(path, len(kept))
    return sum(len(json.loads(line)["token_ids"]) for line in kept.splitlines())


if __name__ == "__main__":
    main()

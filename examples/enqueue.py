"""Enqueue and forget: hand a prompt over, print its id, and leave.

    python examples/enqueue.py --id order-42 "Write a thank-you note for order 42."

The id makes it safe to run twice: the same id with the same prompt is the same request. Read the
answer whenever you like, with examples/resume.py or `headrace attach order-42`.
"""

from __future__ import annotations

import argparse
import os

from headrace import Client


def main() -> None:
    """Submit one prompt; return as soon as Redis has it."""
    options = parse()
    with Client(options.redis_url) as client:
        print(
            client.submit(
                options.prompt,
                request_id=options.id,
                max_tokens=options.max_tokens,
                ttl=options.ttl,
            )
        )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prompt")
    parser.add_argument("--id", help="your own name for the request")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--ttl", type=float, default=86_400.0, help="seconds until it expires")
    parser.add_argument(
        "--redis-url", default=os.environ.get("REDIS_URL", "redis://localhost:6379/0")
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

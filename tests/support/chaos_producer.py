"""A producer to be killed: URL, queue, then id/prompt/max_tokens/seed of each request."""

from __future__ import annotations

import sys

from headrace import Client
from support.chaos_clients import PATIENT, options_of
from support.queue_driver import TENANT
from support.streams import Asked


def main(url: str, queue: str, *words: str) -> None:
    """Submit each request once."""
    with Client(url, queue=queue, tenant=TENANT, timeout=PATIENT) as client:
        for word in words:
            request = parse(word)
            client.submit(list(request.prompt), **options_of(request))


def parse(word: str) -> Asked:
    """Return the request that a word of the command line describes."""
    request_id, prompt, max_tokens, seed = word.split("/")
    return Asked(request_id, tuple(map(int, prompt.split(","))), int(max_tokens), int(seed))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Facts out of a text: the answer is JSON that fits a schema, whatever the model would have said.

    python examples/extract.py "Ada Lovelace was born in London in 1815."

The worker lets the model write only what the schema allows; docs/requests.md has the other forms.
"""

from __future__ import annotations

import argparse
import json
import os

from headrace import Client, FinishReason

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "year": {"type": "integer"}},
    "required": ["name", "year"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask, parse and print; an answer that was cut off is no JSON."""
    options = parse()
    with Client(options.redis_url) as client:
        answer = client.generate(
            messages=[
                {"role": "system", "content": "Answer with the person's name and year of birth."},
                {"role": "user", "content": options.text},
            ],
            response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            temperature=0,
            max_tokens=options.max_tokens,
        )
    if answer.finish_reason is FinishReason.LENGTH:
        raise SystemExit(f"cut off after {options.max_tokens} tokens: {answer.text}")
    person = json.loads(answer.text)
    print(f"{person['name']}, {person['year']}")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument(
        "--redis-url", default=os.environ.get("REDIS_URL", "redis://localhost:6379/0")
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

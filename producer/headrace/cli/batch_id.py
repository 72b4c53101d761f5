"""Request ids of a batch: made from what is asked, so that a later run finds its own work in Redis.

``<batch>/<custom_id>-<digest>:<attempt>``. The same line of the same files has the same id in every
run and attaches to what is there. A line whose text was changed has another digest and is asked
anew. A try that ended in an error keeps its id, so the next try takes the next number.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from headrace.cli.batch_body import BatchBody
from headrace.cli.batch_file import BatchRequest, id_digest

_READABLE = re.compile(r"[A-Za-z0-9._@+=-]{1,80}")


def batch_id(source: Path | None, target: Path | None) -> str:
    """Return the id of a batch, from the paths of its files; their content plays no part."""
    names = "\0".join(str(path.resolve()) if path else "-" for path in (source, target))
    return f"batch-{hashlib.blake2b(names.encode(), digest_size=6).hexdigest()}"


def request_id(batch: str, request: BatchRequest, attempt: int) -> str:
    """Return the request id of one try, from 1, of one line."""
    custom_id = request.custom_id
    name = custom_id if _READABLE.fullmatch(custom_id) else id_digest(custom_id).hex()
    return f"{batch}/{name}-{_body_digest(request.body)}:{attempt}"


def _body_digest(body: BatchBody) -> str:
    asked: list[Any] = [body.prompt, body.messages, body.sampling.to_wire(), body.model]
    if body.tools or body.chat_template_kwargs:
        asked += [body.tools, body.chat_template_kwargs]
    text = json.dumps(asked)  # keys as they stand: an answer has the properties in their order
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

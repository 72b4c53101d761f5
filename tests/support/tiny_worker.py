"""A worker process as users start it, with its real engine over a tiny random model."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from headrace import Client, Completion
from headrace.functions import EmitItem
from headrace.keys import Keys
from headrace.protocol import ChunkMessage, encode_chunk
from headrace_worker.serving.tokenizer_export import export
from headrace_worker.serving.tokenizer_store import tokenizer_folder
from headrace_worker.wiring import ENGINE_COMMAND
from support.queue_driver import TENANT, QueueDriver
from support.servers import running_server
from support.tiny_models import make_tiny_llama
from support.workers import WorkerProcess, worker_farm

QUEUE = "tiny"
CHAT_TEMPLATE = (
    "{% if mood %}({{ mood }}){% endif %}"
    "{% if tools %}{{ tools | map(attribute='function.name') | join(',') }};{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class TinyWorker:
    """A worker, somebody who asks it, and its queue seen from outside."""

    process: WorkerProcess
    client: Client
    driver: QueueDriver

    def ask(self, prompt: str | list[int] | None = "the river", **options: Any) -> Completion:
        """Return the answer to a request, greedy and without an end of its own by default."""
        defaults = {"max_tokens": 16, "temperature": 0, "seed": 1, "ignore_eos": True}
        return self.client.generate(prompt, **{**defaults, **options})

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let the worker claim nothing for a while."""
        self.process.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send(signal.SIGCONT)

    def vanish_with(self, emitted: Mapping[str, ChunkMessage | None]) -> None:
        """Take all of these requests as another worker, write this to their logs, and leave.

        Nothing else may be queued, and the worker has to be held.
        """
        grants = [self.driver.grant("another") for _ in emitted]
        for grant in grants:
            if (chunk := emitted[grant.request_id]) is not None:
                num_tokens, entry = len(chunk.token_ids), encode_chunk(chunk)
                item = EmitItem(TENANT, grant.request_id, grant.epoch, 0, num_tokens, entry)
                self.driver.emit_all([item], "another")
        assert self.driver.release(*grants, worker_id="another") == len(grants)


@contextmanager
def tiny_worker(folder: Path, **settings: str) -> Iterator[TinyWorker]:
    """Give a worker that claims, with variables of its own; nothing of it is left afterwards."""
    model = make_tiny_llama(folder / "tiny")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (cached := tokenizer_folder(model, folder / "cache/tokenizers")).mkdir(parents=True)
    export(model, cached)  # as a worker does at its first start, but in this process
    env = {
        "HEADRACE_MODEL": str(model),
        "HEADRACE_SERVED_MODEL_NAME": "tiny",
        "HEADRACE_ENGINE_COMMAND": shlex.join(ENGINE_COMMAND),
        "HEADRACE_ATTENTION_BACKEND": "reference",
        "HEADRACE_DTYPE": "float32",
        "HEADRACE_KV_CACHE_MEMORY": "24MiB",
        "HEADRACE_NUM_THREADS": "1",
        **settings,
    }
    with (
        running_server("valkey") as server,
        worker_farm(folder, server.url, QUEUE) as farm,
        Client(server.url, queue=QUEUE, tenant=TENANT) as client,
        server.connect() as connection,
    ):
        yield TinyWorker(farm.ready(env=env), client, _driver(connection))


def _driver(connection: redis.Redis) -> QueueDriver:
    return QueueDriver(connection, Keys(QUEUE))

"""The client stays light: what an import loads, and what an installation brings."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

HEAVY = {
    "headrace_worker",
    "torch",
    "transformers",
    "numpy",
    "structlog",
    "pydantic",
    "typer",
    "rich",
    "httpx",
}


def loaded_by(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the top-level modules that it has loaded."""
    report = "import json, sys; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    return set(json.loads(run.stdout))


def third_party(modules: set[str]) -> set[str]:
    """Return the modules that Python itself does not bring, nor the environment's start-up."""
    return modules - sys.stdlib_module_names - loaded_by("")


def test_importing_headrace_loads_nothing_else() -> None:
    """Types and errors cost no dependency; redis-py and msgpack wait until a client is named."""
    assert third_party(loaded_by("import headrace")) == {"headrace"}


@pytest.mark.parametrize(
    "code",
    [
        "from headrace import AsyncClient, Client, TokenStream, SyncTokenStream",
        "from headrace.testing import FakeWorker",
        "import headrace.client, headrace.sync_client",
    ],
)
def test_clients_load_nothing_heavy(code: str) -> None:
    """A backend that uses the client does not pay for a worker, a model or a command line."""
    loaded = loaded_by(code)
    assert {"headrace", "redis", "msgpack"} <= loaded
    assert not loaded & HEAVY


def test_every_public_name_can_be_imported() -> None:
    """What the package says it has, it has."""
    loaded_by("import headrace\nfor name in headrace.__all__: getattr(headrace, name)")


def test_unknown_name_is_an_attribute_error() -> None:
    """Loading on demand does not hide a misspelt name."""
    loaded_by(
        "import headrace\n"
        "try: headrace.Cilent\n"
        "except AttributeError as error: assert 'Cilent' in str(error)\n"
        "else: raise SystemExit('no error')"
    )


def test_installation_brings_redis_and_msgpack_only() -> None:
    """The built distribution requires, without extras, exactly two others."""
    required = [Requirement(line) for line in requires("headrace") or []]
    assert {r.name for r in required if r.marker is None} == {"redis", "msgpack"}

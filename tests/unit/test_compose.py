"""compose.yaml follows the specification and keeps what the queue's promises rest on."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from headrace_worker.options import load_settings
from support.repository import ROOT

PATH = ROOT / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(PATH.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = ["worker-cpu", "worker-gpu"]
BUILT = [name for name, service in SERVICES.items() if "build" in service]


def _check_schema(path: str) -> subprocess.CompletedProcess[str]:
    schema = ["--builtin-schema", "vendor.compose-spec"]
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *schema, path],
        check=False,
        capture_output=True,
        text=True,
    )


def _seconds(duration: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(s|m)", duration).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60}[unit]


def _dockerfile(service: str) -> str:
    path: str = SERVICES[service]["build"]["dockerfile"]
    return (ROOT / path).read_text()


def test_the_file_follows_the_compose_specification() -> None:
    """The published schema accepts compose.yaml."""
    result = _check_schema(str(PATH))
    assert result.returncode == 0, result.stdout


def test_the_schema_refuses_a_misspelt_key(tmp_path: Any) -> None:
    """The check is not blind: one wrong key is refused by name."""
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(PATH.read_text().replace("stop_grace_period: 1m", "stop_grace_time: 1m"))
    result = _check_schema(str(wrong))
    assert result.returncode == 1
    assert "stop_grace_time" in result.stdout


def test_the_queue_never_evicts_and_keeps_an_append_only_file() -> None:
    """The server gets the eviction policy and the persistence that the promises need."""
    command = SERVICES["queue"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--maxmemory-policy"] == "noeviction"
    assert options["--appendonly"] == "yes"
    assert options["--appendfsync"] == "everysec"


def test_the_queue_takes_a_file_of_users() -> None:
    """Without one the server reads an empty file, which changes nothing."""
    command = SERVICES["queue"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    source, target, mode = SERVICES["queue"]["volumes"][1].rsplit(":", 2)
    assert (target, mode) == (options["--aclfile"], "ro")
    assert source == "${HEADRACE_ACL_FILE:-/dev/null}"


def test_the_queue_outlives_its_container() -> None:
    """The append-only file lies in a named volume, so `down` and `up` keep every request."""
    volume, folder = SERVICES["queue"]["volumes"][0].split(":")
    assert folder == "/data"
    assert volume in COMPOSE["volumes"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_watched_and_started_again(name: str) -> None:
    """Each service has a health check and comes back after a crash."""
    assert SERVICES[name]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", BUILT)
def test_what_we_build_waits_for_a_healthy_queue(name: str) -> None:
    """A worker or backend starts when the server has read its file back, not before."""
    assert SERVICES[name]["depends_on"] == {"queue": {"condition": "service_healthy"}}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_ports_are_published_on_loopback_only(name: str) -> None:
    """Nothing without a password is offered to the network."""
    for port in SERVICES[name].get("ports", []):
        assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("name", WORKERS)
def test_a_stop_leaves_time_to_drain(name: str) -> None:
    """The grace period is longer than the drain, so a stop hands over and is never a kill."""
    service = SERVICES[name]
    drain = _seconds(service["environment"]["HEADRACE_DRAIN_TIMEOUT"])
    assert _seconds(service["stop_grace_period"]) > drain


def test_a_plain_up_starts_queue_gpu_worker_and_backend() -> None:
    """Each worker is in a profile of its own, the backend is in both, and .env chooses gpu."""
    assert "COMPOSE_PROFILES=gpu" in (ROOT / ".env").read_text().splitlines()
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert profiles == {
        "queue": [],
        "worker-cpu": ["cpu"],
        "worker-gpu": ["gpu"],
        "backend": ["cpu", "gpu"],
    }


def test_the_gpu_worker_reserves_one_gpu_and_the_cpu_worker_none() -> None:
    """The reservation is the one that the container toolkit understands."""
    reserved = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert reserved == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert "deploy" not in SERVICES["worker-cpu"]


@pytest.mark.parametrize("name", BUILT)
def test_images_run_without_privileges(name: str) -> None:
    """What we build runs as an ordinary user, without capabilities."""
    assert re.search(r"^USER headrace$", _dockerfile(name), re.MULTILINE)
    assert SERVICES[name]["cap_drop"] == ["ALL"]
    assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", BUILT)
def test_dockerfiles_copy_only_what_the_context_holds(name: str) -> None:
    """Each COPY source exists and is let through by .dockerignore."""
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for line in re.findall(r"^COPY (.+)$", _dockerfile(name), re.MULTILINE):
        for source in line.split()[:-1]:
            assert source in allowed
            assert (ROOT / source).exists()


@pytest.mark.parametrize("name", WORKERS)
def test_worker_images_take_the_steps_of_make_setup(name: str) -> None:
    """An image installs torch first, at the Makefile's version, then the package with extras."""
    makefile = (ROOT / "Makefile").read_text()
    version = re.search(r"\$\(shell (sed .*? pyproject\.toml)\)", makefile)
    assert version is not None
    torch, package = re.findall(r"^RUN pip install (.+)$", _dockerfile(name), re.MULTILINE)
    assert torch.removeprefix('--index-url "$TORCH_INDEX" ') == f'"$({version[1]})"'
    assert re.match(r"'\.\[cli,(worker|cuda)\]'", package)


@pytest.mark.parametrize("name", WORKERS)
def test_the_worker_takes_every_variable_that_it_is_given(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings accept the environment of compose.yaml, and the probe asks their port."""
    for variable, value in SERVICES[name]["environment"].items():
        default = re.fullmatch(r"\$\{\w+:-(.*)\}", value)
        monkeypatch.setenv(variable, default[1] if default else value)
    settings = load_settings({})
    assert settings.model == "smollm2-135m"
    assert f":{settings.metrics_port}/readyz" in SERVICES[name]["healthcheck"]["test"][-1]

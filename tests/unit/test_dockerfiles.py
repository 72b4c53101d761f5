"""The images install what pyproject.toml says, in an order that keeps the large layer."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from support.repository import ROOT

CPU, CUDA = "docker/Dockerfile", "docker/Dockerfile.cuda"


def lines(path: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions, continued lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (ROOT / path).read_text(), flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", "", text)
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line]


def runs(path: str) -> list[str]:
    """Return the shell commands of an image's build."""
    return [rest for name, rest in lines(path) if name == "RUN"]


def arguments(path: str) -> dict[str, str]:
    """Return the build arguments with their defaults."""
    pairs = (rest.partition("=") for name, rest in lines(path) if name == "ARG")
    return {name: value.strip('"') for name, _, value in pairs}


def variants() -> list[str]:
    """Return the extras that name a torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return [name for name, needs in extras.items() if any(n.startswith("torch") for n in needs)]


@pytest.mark.parametrize("path", [CPU, CUDA])
def test_shell_commands_are_well_formed(path: str) -> None:
    """A shell parses every RUN line."""
    for command in runs(path):
        subprocess.run(["sh", "-n", "-c", command], check=True)


@pytest.mark.parametrize("path", [CPU, CUDA])
def test_torch_comes_before_the_source(path: str) -> None:
    """A change of source leaves the layer with torch alone, and the version is the pinned one."""
    order = [rest for name, rest in lines(path) if name in ("RUN", "COPY")]
    [torch] = [place for place, rest in enumerate(order) if "torch==" in rest]
    assert torch < order.index("producer producer")
    command = re.search(r"\$\((sed .* pyproject\.toml)\)", order[torch])
    assert command is not None
    found = subprocess.run(
        command[1], shell=True, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+\n", found.stdout)


@pytest.mark.parametrize(("path", "extra"), [(CPU, "worker"), (CUDA, "cuda")])
def test_an_image_installs_its_own_extra(path: str, extra: str) -> None:
    """Each names one extra with a torch, and pyproject.toml has it."""
    assert extra in variants()
    assert f"pip install '.[cli,{extra}]'" in runs(path)


def test_the_gpu_image_starts_from_stock_cuda_13() -> None:
    """Image and index of torch are of the same CUDA, and both can be named otherwise."""
    defaults = arguments(CUDA)
    assert lines(CUDA)[1] == ("FROM", "${CUDA_IMAGE}")
    image = re.fullmatch(
        r"nvidia/cuda:(\d+)\.(\d)\.\d+-runtime-ubuntu24\.04", defaults["CUDA_IMAGE"]
    )
    assert image is not None
    assert defaults["TORCH_INDEX"].endswith(f"/cu{image[1]}{image[2]}")
    assert any('--index-url "$TORCH_INDEX"' in command for command in runs(CUDA))


def test_the_gpu_image_has_what_triton_compiles_with() -> None:
    """A C compiler and Python's headers: without them the first step would fail, not the build."""
    [packages] = [command for command in runs(CUDA) if "apt-get install" in command]
    assert {"gcc", "libc6-dev", "python3-dev", "python3-venv"} <= set(packages.split())


@pytest.mark.parametrize("asked", ["", "flash-attn==2.8.3.post2"])
def test_flash_attn_is_installed_when_it_is_asked_for(asked: str) -> None:
    """Against the torch that is there; nothing happens by default."""
    assert arguments(CUDA)["FLASH_ATTN"] == ""
    [command] = [command for command in runs(CUDA) if "FLASH_ATTN" in command]
    script = f'pip() {{ echo "pip $*"; }}; FLASH_ATTN="{asked}"; {command}'
    told = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert ("pip install --no-build-isolation flash-attn==2.8.3.post2" in told) is bool(asked)
    assert bool(told) is bool(asked)


def test_the_gpu_image_runs_from_its_environment() -> None:
    """`python` and `headrace` are those of the environment that everything is installed into."""
    assert ("ENV", "PATH=/opt/headrace/bin:$PATH") in lines(CUDA)
    assert any("python3 -m venv /opt/headrace" in command for command in runs(CUDA))

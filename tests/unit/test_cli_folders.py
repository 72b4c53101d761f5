"""Folders: our own variables first, then XDG's, then the usual places."""

from __future__ import annotations

from pathlib import Path

from headrace.folders import cache_folder, models_folder, state_folder


def test_the_usual_places_are_under_home() -> None:
    """Without variables, the folders are those that the XDG specification names."""
    assert cache_folder({}) == Path.home() / ".cache" / "headrace"
    assert state_folder({}) == Path.home() / ".local" / "state" / "headrace"


def test_xdg_variables_are_respected(tmp_path: Path) -> None:
    """An absolute XDG folder is used, a relative one is ignored as the specification says."""
    environ = {"XDG_CACHE_HOME": str(tmp_path), "XDG_STATE_HOME": "relative"}
    assert cache_folder(environ) == tmp_path / "headrace"
    assert state_folder(environ) == Path.home() / ".local" / "state" / "headrace"


def test_our_own_variables_win(tmp_path: Path) -> None:
    """HEADRACE_CACHE_DIR and HEADRACE_STATE_DIR name the folder itself."""
    environ = {
        "HEADRACE_CACHE_DIR": str(tmp_path / "c"),
        "HEADRACE_STATE_DIR": "~/s",
        "XDG_CACHE_HOME": "/elsewhere",
    }
    assert models_folder(environ) == tmp_path / "c" / "models"
    assert state_folder(environ) == Path.home() / "s"

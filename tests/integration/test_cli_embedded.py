"""The embedded server: shared, persistent, gone with its last user, and safe against crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from headrace.cli import embedded, keeper
from headrace.cli.embedded import embedded_server, join_server
from headrace.errors import ConfigurationError, TransportError
from support.waiting import eventually

USER = """
import sys; from pathlib import Path; from headrace.cli.embedded import join_server
print(join_server(Path(sys.argv[1])).url, flush=True); sys.stdin.read()
"""


def servers_of(state: Path) -> list[int]:
    """Process ids of keepers and servers that were started for a state folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes()
        except OSError:
            continue
        if str(state).encode() in command and (b"keeper.py" in command or b"valkey" in command):
            found.append(int(entry.parent.name))
    return found


def is_gone(state: Path) -> bool:
    """Whether no process of a state folder is left."""
    return not servers_of(state)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder whose server must be gone at the end of the test."""
    folder = (tmp_path / "state").resolve()
    yield folder
    eventually(lambda: is_gone(folder))


def user(state: Path) -> subprocess.Popen[str]:
    """Another command that uses the server until it is killed or its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", USER, str(state)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("unix://")
    return process


def test_data_survives_between_commands(state: Path) -> None:
    """What one command stored is there for the next one, through the append-only file."""
    with embedded_server(state) as server:
        redis.Redis.from_url(server.url).set("answer", 42)
    eventually(lambda: is_gone(state))
    with embedded_server(state) as server:
        assert redis.Redis.from_url(server.url).get("answer") == b"42"


def test_the_server_is_set_up_for_a_queue(state: Path) -> None:
    """AOF every second, no eviction, no TCP, and a folder that only its owner may read."""
    with embedded_server(state) as server:
        client = redis.Redis.from_url(server.url)
        expected = {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "port": "0",
        }
        assert client.config_get(*expected) == expected
        assert server.folder.stat().st_mode & 0o077 == 0


def test_commands_share_one_server(state: Path) -> None:
    """A second command joins the running server, which outlives the command that started it."""
    with embedded_server(state) as first:
        second = join_server(state)
        assert second.url == first.url
        client = redis.Redis.from_url(first.url)
        run_id = client.info("server")["run_id"]
    assert client.info("server")["run_id"] == run_id
    os.close(second.lock_fd)


def test_newcomers_at_the_same_moment_start_one_server(state: Path) -> None:
    """Eight commands at once end up on the same server."""

    def run_id(_: int) -> str:
        with embedded_server(state) as server:
            found: str = redis.Redis.from_url(server.url).info("server")["run_id"]
            barrier.append(found)
            eventually(lambda: len(barrier) == 8)
            return found

    barrier: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(run_id, range(8)))) == 1


def test_a_killed_command_leaves_no_server(state: Path) -> None:
    """SIGKILL of the only user stops the server, cleanly."""
    process = user(state)
    assert servers_of(state)
    process.kill()
    process.wait()
    eventually(lambda: is_gone(state))
    assert "ready to exit" in (state / "valkey" / "valkey.log").read_text()


def test_a_killed_command_does_not_disturb_the_others(state: Path) -> None:
    """The server stays up for those that are left."""
    process = user(state)
    with embedded_server(state) as server:
        process.kill()
        process.wait()
        assert redis.Redis.from_url(server.url).ping()


def test_a_child_with_the_lock_holds_the_server_up(state: Path) -> None:
    """A worker that inherits the lock can still hand its requests back when its command is gone."""
    server = join_server(state)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(server.lock_fd,))
    os.close(server.lock_fd)
    client = redis.Redis.from_url(server.url)
    assert client.ping()
    child.communicate()
    eventually(lambda: is_gone(state))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the parent's death signal")
def test_a_killed_keeper_takes_the_server_along(state: Path) -> None:
    """After the keeper's SIGKILL the next command starts anew on the same data."""
    with embedded_server(state) as server:
        redis.Redis.from_url(server.url).set("answer", 42)
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in servers_of(state)}
        (keeper_pid,) = (pid for pid, line in lines.items() if b"keeper.py" in line)
        os.kill(keeper_pid, signal.SIGKILL)
        eventually(lambda: is_gone(state))
        with embedded_server(state) as again:
            assert redis.Redis.from_url(again.url).get("answer") == b"42"


def test_a_killed_server_is_recovered(state: Path) -> None:
    """A stale socket is no obstacle, and what was synced is there again."""
    with embedded_server(state) as server:
        client = redis.Redis.from_url(server.url)
        client.set("answer", 42)
        client.waitaof(1, 0, 2000)
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
        eventually(lambda: is_gone(state))
        assert (server.folder / "valkey.sock").exists()
        with embedded_server(state) as again:
            assert redis.Redis.from_url(again.url).get("answer") == b"42"


def test_a_long_path_gets_a_short_socket(state: Path) -> None:
    """A state folder deeper than a socket's name may be works, too."""
    deep = state / ("d" * 60) / ("e" * 60)
    with embedded_server(deep) as server:
        assert redis.Redis.from_url(server.url).ping()
        socket_path = server.url.removeprefix("unix://")
    assert len(socket_path) <= embedded.MAX_SOCKET_PATH_BYTES


def test_a_place_for_the_short_socket_is_asked_for(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a temporary folder that is too deep, too, the error says what to set."""
    deep = state / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigurationError, match="set TMPDIR"), embedded_server(deep):
        pass


def test_a_path_with_spaces_works(state: Path) -> None:
    """Blanks and percent signs in the folder's name reach the server unharmed."""
    with embedded_server(state / "my 50% state") as server:
        assert redis.Redis.from_url(server.url).ping()


def test_a_server_that_cannot_start_says_why(state: Path) -> None:
    """The last lines of its log are part of the error."""
    folder = state / "valkey"
    folder.mkdir(parents=True)
    (folder / "appendonlydir").write_text("a file where a folder should be")
    with (
        pytest.raises(TransportError, match=r"(?s)did not start.*append-only"),
        embedded_server(state),
    ):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file in the way is a configuration error with the path in it."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigurationError, match=r"file/valkey cannot be made"),
        embedded_server(tmp_path / "file"),
    ):
        pass


def test_a_ping_of_nothing_is_unanswered(tmp_path: Path) -> None:
    """A socket that does not exist, or that nobody serves, is no server."""
    assert not keeper.answers_ping(str(tmp_path / "none.sock"))


@pytest.mark.parametrize("name", ["users.lock", "start.lock"])
def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path, name: str) -> None:
    """A state folder that cannot be used is a configuration error, whatever is wrong with it."""
    (tmp_path / "valkey" / name).mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=name), embedded_server(tmp_path):
        pass

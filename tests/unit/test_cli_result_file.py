"""The result file: what a second run keeps, drops, cuts off and refuses to touch."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.batch_file import id_digest
from headrace.cli.batch_result import encode_line, error_line
from headrace.cli.exits import CommandError
from headrace.cli.result_file import ResultFile
from headrace.errors import ConfigurationError


def answered(custom_id: str) -> dict[str, Any]:
    """A result line with an answer."""
    response = {"status_code": 200, "request_id": f"b/{custom_id}:1", "body": {}}
    return {"id": "l", "custom_id": custom_id, "response": response, "error": None}


def failed(custom_id: str | None, code: str, attempt: int | None = 1) -> dict[str, Any]:
    """A result line with an error; attempt None: it never reached the queue."""
    request_id = None if attempt is None else f"b/{custom_id}:{attempt}"
    return error_line("l", custom_id, code, "m", request_id)


def write(path: Path, *lines: dict[str, Any], tail: bytes = b"") -> None:
    """Lay a result file."""
    path.write_bytes(b"".join(map(encode_line, lines)) + tail)


def ids(path: Path) -> list[str | None]:
    """The custom_ids in a result file."""
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def test_a_new_file_is_made_and_appended_to(tmp_path: Path) -> None:
    """Lines appear in the order in which they were appended."""
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        results.append(answered("a"))
        results.append(answered("b"))
        assert ids(path) == ["a", "b"]
    assert not results.earlier.answered


def test_answers_of_an_earlier_run_are_known_and_kept(tmp_path: Path) -> None:
    """A second run sees what is done and adds to it."""
    path = tmp_path / "out.jsonl"
    write(path, answered("a"), failed("b", "dead_lettered"))
    with ResultFile(path) as results:
        results.append(answered("c"))
    assert results.earlier.answered == {id_digest("a"), id_digest("b")}
    assert results.earlier.num_failed == 1
    assert ids(path) == ["a", "b", "c"]


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    """Half a line left by a crash goes, and its request counts as not answered."""
    path = tmp_path / "out.jsonl"
    write(path, answered("a"), tail=encode_line(answered("b"))[:-1])
    with ResultFile(path) as results:
        results.append(answered("b"))
    assert results.earlier.answered == {id_digest("a")}
    assert ids(path) == ["a", "b"]


@pytest.mark.parametrize("code", ["engine_failure", "context_length_exceeded", "unknown_model"])
def test_errors_are_taken_out_and_their_tries_counted(tmp_path: Path, code: str) -> None:
    """What will be asked again leaves the file, so no input line has two result lines."""
    path = tmp_path / "out.jsonl"
    write(path, failed("a", code, attempt=3), answered("b"))
    with ResultFile(path) as results:
        assert ids(path) == ["b"]
    assert results.earlier.attempts == {id_digest("a"): 3}


def test_bad_lines_are_read_again(tmp_path: Path) -> None:
    """What never reached the queue leaves the file, since its line may have been mended."""
    path = tmp_path / "out.jsonl"
    bad = [failed(None, "invalid_line", None), failed("c", "invalid_request", None)]
    write(path, *bad, answered("a"), failed("a", "duplicate_custom_id", None))
    with ResultFile(path) as results:
        assert ids(path) == ["a"]
    assert results.earlier.answered == {id_digest("a")}
    assert results.earlier.num_failed == 0


@pytest.mark.parametrize(
    "foreign", [b"a story\n", b"{}\n", b"[1]\n", b'{"custom_id": "a", "response": null}\n']
)
def test_a_file_of_something_else_is_not_touched(tmp_path: Path, foreign: bytes) -> None:
    """A wrong -o is refused by line, and the file keeps its bytes."""
    path = tmp_path / "story.txt"
    path.write_bytes(foreign)
    with pytest.raises(ConfigurationError, match="line 1 of"), ResultFile(path):
        pass
    assert path.read_bytes() == foreign


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    """The second run is told, also after the first has rewritten the file."""
    path = tmp_path / "out.jsonl"
    write(path, failed("a", "lost"))
    with ResultFile(path), pytest.raises(ConfigurationError, match="another run"), ResultFile(path):
        pass
    with ResultFile(path):
        pass


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    """An output path that cannot be made is a configuration error."""
    with (
        pytest.raises(ConfigurationError, match="cannot be written"),
        ResultFile(tmp_path / "no" / "out.jsonl"),
    ):
        pass


def test_a_rewrite_leaves_no_other_file(tmp_path: Path) -> None:
    """The temporary file of a resume takes the place of the old one."""
    path = tmp_path / "out.jsonl"
    write(path, failed("a", "lost"), answered("b"))
    with ResultFile(path):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_linked_output_stays_a_link(tmp_path: Path) -> None:
    """A resume rewrites the file that the link leads to."""
    path, link = tmp_path / "out.jsonl", tmp_path / "link"
    write(path, answered("a"), tail=b"{")
    link.symlink_to(path)
    with ResultFile(link) as results:
        results.append(answered("b"))
    assert link.is_symlink()
    assert ids(path) == ["a", "b"]


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
def test_a_device_is_refused(device: str) -> None:
    """What cannot be read back cannot be resumed; a dash and the shell can write there."""
    with pytest.raises(ConfigurationError, match="not a file"), ResultFile(Path(device)):
        pass


def append_beyond(path: Path, num_bytes: int) -> None:
    """Append two lines where no file may be larger than so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        with ResultFile(path) as results:
            results.append(answered("a"))
            results.append(answered("b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_said_in_a_line(tmp_path: Path) -> None:
    """The command ends with the reason, and what was written whole is there for the next run."""
    path = tmp_path / "out.jsonl"
    with pytest.raises(CommandError, match="cannot be written"):
        append_beyond(path, len(encode_line(answered("a"))) + 10)
    with ResultFile(path) as results:
        assert results.earlier.answered == {id_digest("a")}

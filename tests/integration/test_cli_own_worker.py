"""Commands that bring their own server and worker: real processes, with the fake engine inside."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import supervisor
from support.command import Ended, make_caller, processes_naming, start
from support.engine_process import FAKE_ENGINE
from support.waiting import PATIENCE_S, eventually
from support.workers import SHORT_LEASE_S, make_model

GREEDY = ("--raw", "--temperature", "0", "--seed", "1")
TALKATIVE = (*GREEDY[:-1], "197")  # "Hi" has an answer of 1065 tokens, "Ho" one of 414


class Home:
    """A state folder of a test, and the variables that lead commands to it."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.model = make_model(folder)
        self.environment = {
            "HEADRACE_STATE_DIR": str(self.state),
            "HEADRACE_CACHE_DIR": str(folder / "cache"),
            "HEADRACE_MODEL": str(self.model),
            "HEADRACE_ENGINE_COMMAND": shlex.join(FAKE_ENGINE),
        }
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        """Start a command."""
        self._started.append(start(*arguments, **{**self.environment, **extra}))
        return self._started[-1]

    def close(self) -> None:
        """Kill what a failed test left."""
        for process in self._started:
            process.kill()
            process.communicate()

    def call(self, *arguments: str, **extra: str) -> Ended:
        """Run a command to its end."""
        process = self.start(*arguments, **extra)
        out, err = process.communicate(timeout=PATIENCE_S)
        return Ended(process.returncode, out, err)

    def workers(self) -> list[int]:
        """Process ids of the workers, their engines apart."""
        pids = processes_naming(self.state)
        return [pid for pid in pids if b"-m\0headrace_worker\0" in command_line(pid)]

    @property
    def is_quiet(self) -> bool:
        """Whether no process of any command is left."""
        return not processes_naming(self.state)

    @property
    def log(self) -> str:
        """What the workers wrote."""
        path = self.state / "worker.log"
        return path.read_text() if path.exists() else ""


def command_line(pid: int) -> bytes:
    """Return the arguments of a process, or nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """Give a place without a server; every process must be gone at the end."""
    home = Home(tmp_path)
    yield home
    home.close()
    eventually(lambda: home.is_quiet)


def slow(step_s: float) -> str:
    """The command of an engine that takes its time."""
    return shlex.join([*FAKE_ENGINE, "--step-s", str(step_s)])


def test_generate_brings_a_server_and_a_worker(home: Home) -> None:
    """Without any set-up there is an answer, twice the same, and nothing is left running."""
    first = home.call("generate", "Hi", *GREEDY, "--max-tokens", "8")
    assert (first.code, first.out != "\n") == (0, True), first.err
    assert "8 tokens after 2" in first.err
    eventually(lambda: home.is_quiet)
    assert home.call("generate", "Hi", *GREEDY, "--max-tokens", "8").out == first.out


def test_a_worker_that_cannot_start_is_reported(home: Home) -> None:
    """The last lines of its log say why, and the command does not wait for it."""
    ended = home.call("generate", "Hi", "--model", "/no/such/model")
    assert ended.code == 1
    assert "the worker did not start" in ended.err
    assert "/no/such/model" in ended.err
    assert "Traceback" not in ended.err


def test_a_wrong_setting_of_the_worker_is_reported(home: Home) -> None:
    """Variables meant for the worker are checked by it, and its words come through."""
    ended = home.call("generate", "Hi", HEADRACE_MAX_NUM_SEQS="0")
    assert ended.code == 1
    assert "HEADRACE_MAX_NUM_SEQS=0: " in ended.err


def test_a_misspelt_variable_is_refused_before_anything_starts(home: Home) -> None:
    """The nearest name is given, and no server is left to stop."""
    ended = home.call("generate", "Hi", HEADRACE_MAX_NUM_SEQ="8")
    assert ended.code == 2
    assert "HEADRACE_MAX_NUM_SEQ: no such variable" in ended.err
    assert "HEADRACE_MAX_NUM_SEQS" in ended.err
    assert home.is_quiet


def test_a_killed_command_leaves_nothing_running(home: Home) -> None:
    """SIGKILL takes the worker, its engine and the server along, and the next command works."""
    process = home.start(
        "generate", "Hi", *TALKATIVE, "--max-tokens", "2000", HEADRACE_ENGINE_COMMAND=slow(0.05)
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    eventually(lambda: home.is_quiet)
    assert home.call("generate", "Ho", *GREEDY, "--max-tokens", "4").code == 0


def test_ctrl_c_lets_the_worker_stop_in_order(home: Home) -> None:
    """The request is cancelled, the worker says goodbye, and the exit code is 130."""
    process = home.start(
        "generate", "Hi", *TALKATIVE, "--max-tokens", "2000", HEADRACE_ENGINE_COMMAND=slow(0.05)
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert '"event": "worker.stopped"' in home.log
    queued = json.loads(home.call("status", "--json").out)
    assert (queued["queued"], queued["running"]) == (0, 0)


def test_a_worker_that_dies_is_started_again(home: Home) -> None:
    """The answer is complete although its worker was killed half way."""
    undisturbed = home.call("generate", "Hi", *TALKATIVE, "--max-tokens", "40")
    settings = {"HEADRACE_ENGINE_COMMAND": slow(0.1), "HEADRACE_LEASE_TTL": f"{SHORT_LEASE_S}s"}
    process = home.start("generate", "Hi", *TALKATIVE, "--max-tokens", "40", **settings)
    assert process.stdout is not None
    first = process.stdout.read(1)
    [pid] = home.workers()
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, first + out) == (0, undisturbed.out), err


def test_commands_at_the_same_time_share_one_worker(home: Home) -> None:
    """The second one finds the queue served, and takes over when the first is gone."""
    engine = {"HEADRACE_ENGINE_COMMAND": slow(0.02)}
    first = home.start("generate", "Hi", *TALKATIVE, "--max-tokens", "2000", **engine)
    assert first.stdout is not None
    assert first.stdout.read(1)
    second = home.start("generate", "Ho", *TALKATIVE, "--max-tokens", "300", **engine)
    assert second.stdout is not None
    assert second.stdout.read(1)
    assert len(home.workers()) == 1
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=PATIENCE_S)
    second.communicate(timeout=PATIENCE_S)
    assert (first.returncode, second.returncode) == (130, 0)
    assert home.log.count('"event": "worker.started"') == 2


def test_another_model_on_a_served_queue_is_refused(home: Home) -> None:
    """What was meant for one model is not answered by another."""
    engine = {"HEADRACE_ENGINE_COMMAND": slow(0.5)}
    first = home.start("generate", "Hi", *TALKATIVE, "--max-tokens", "2000", **engine)
    assert first.stdout is not None
    assert first.stdout.read(1)
    ended = home.call("generate", "Hi", "--model", "smollm2-135m")
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=PATIENCE_S)
    assert (ended.code, first.returncode) == (1, 143)
    assert "serves this queue with model 'model', not 'smollm2-135m'" in ended.err


def test_run_batch_brings_its_worker_too(home: Home, tmp_path: Path) -> None:
    """A file is answered on a machine with nothing running."""
    lines = [
        {
            "custom_id": f"q{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [5, 6, i], "max_tokens": 6, "ignore_eos": True},
        }
        for i in range(20)
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    ended = home.call("run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    assert ended.code == 0, ended.err
    results = [json.loads(raw) for raw in (tmp_path / "out").read_bytes().splitlines()]
    assert len(results) == 20
    assert {r["response"]["body"]["usage"]["completion_tokens"] for r in results} == {6}


def test_worker_serves_what_other_commands_enqueue(home: Home) -> None:
    """headrace worker holds the embedded server up; SIGTERM ends both with code 0."""
    request_id = home.call("enqueue", "Hi", *GREEDY, "--max-tokens", "8").out.strip()
    worker = home.start("worker", "--max-num-seqs", "4")
    attached = home.call("attach", request_id)
    assert attached.code == 0, attached.err
    assert "8 tokens after 2" in attached.err
    assert home.call("generate", "Hi", *GREEDY, "--max-tokens", "8").out == attached.out
    assert len(home.workers()) == 1
    worker.send_signal(signal.SIGTERM)
    _, err = worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == 0, err
    assert "serving the embedded server in" in err


def test_the_help_of_worker_is_the_workers(home: Home) -> None:
    """Its options are those of the worker package, and no server is started for them."""
    ended = home.call("worker", "--help")
    assert ended.code == 0
    assert "--gpu-memory-utilization" in ended.out
    assert not home.state.exists()


def test_the_demo_answers_and_reports(home: Home, tmp_path: Path) -> None:
    """Lines of several streams come interleaved, then answers and numbers."""
    prompts = [
        {
            "custom_id": f"q{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"question {i}", "max_tokens": 12, "ignore_eos": True},
        }
        for i in range(8)
    ]
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, prompts)))
    meeting = slow(0.05)  # without steps that take time, sequences may never meet
    ended = home.call(
        "demo", "--prompts", str(tmp_path / "prompts"), HEADRACE_ENGINE_COMMAND=meeting
    )
    assert ended.code == 0, ended.err
    assert "[01] " in ended.out
    assert "08 question 7" in ended.out
    numbers = ended.out.splitlines()[-8:]
    rows = {line[:18].strip(): line[18:] for line in numbers}
    assert rows["requests"].startswith("8 of 8 in ")
    assert rows["tokens"] == "80 prompt, 96 output"
    assert float(rows["sequences a step"]) > 1
    assert float(rows["tokens a step"]) > 1


def test_without_the_worker_extra_generate_says_how_to_get_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Home
) -> None:
    """Nothing is enqueued that nobody could answer."""
    monkeypatch.setattr(supervisor, "NEEDED_MODULES", ("torch", "no_such_module"))
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(home.state))
    ended = make_caller(capfd, monkeypatch)("generate", "Hi")
    assert ended.code == 2
    assert ended.err == (
        "headrace: the worker is not installed (no_such_module missing): "
        "pip install 'headrace[worker]'\n"
    )

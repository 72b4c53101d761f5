"""Flags, variables and errors: every flag has its variable, every error its exit code."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import typer.main

from headrace import errors
from headrace.cli.app import app
from headrace.cli.exits import CommandError, ExitCode, exit_code_of
from headrace.cli.options import duration, sampling_from, variable_of
from headrace.cli.running import heed_cancellation, run
from headrace.cli.supervisor import worker_environment
from headrace.cli.variables import (
    COMMAND_VARIABLES,
    SHARED_VARIABLES,
    WORKER_VARIABLES,
    check_variables,
)
from headrace.cli.worker import setting, with_defaults
from headrace.errors import ConfigurationError
from headrace_worker.options import OTHER_VARIABLES
from headrace_worker.settings import PREFIX, WorkerSettings


def all_options() -> Iterator[tuple[str, Any]]:
    """Every option of every command, with the command's name."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name in callback_names(command):
                yield name, parameter
        for sub_name, sub_command in getattr(command, "commands", {}).items():
            yield from walk(sub_name, sub_command)

    yield from walk("headrace", typer.main.get_command(app))


def callback_names(command: Any) -> set[str]:
    """Names of the parameters that are ours, help and completion apart."""
    return (
        set() if command.callback is None else set(inspect.signature(command.callback).parameters)
    )


OPTIONS = list(all_options())


@pytest.mark.parametrize(
    ("command", "option"), OPTIONS, ids=lambda value: getattr(value, "name", value)
)
def test_every_flag_is_a_variable(command: str, option: Any) -> None:
    """--top-p is HEADRACE_TOP_P, for every flag of every command."""
    flag = next(name for name in option.opts if name.startswith("--"))
    assert option.envvar == variable_of(flag) == PREFIX + flag[2:].replace("-", "_").upper()


def test_no_variable_of_a_command_stops_its_worker() -> None:
    """A worker refuses unknown variables, so it is not shown those that are the command's."""
    environ = {option.envvar: "x" for _, option in OPTIONS}
    known = {PREFIX + name.upper() for name in WorkerSettings.model_fields}
    known |= {PREFIX + name for name in OTHER_VARIABLES}
    assert set(worker_environment(environ)) <= known


def test_the_variables_of_the_worker_reach_it() -> None:
    """Settings without a flag of the command are inherited."""
    environ = {"HEADRACE_DTYPE": "float32", "HEADRACE_SEED": "1", "PATH": "/bin"}
    assert worker_environment(environ) == {"HEADRACE_DTYPE": "float32", "PATH": "/bin"}
    assert {"HEADRACE_REDIS_URL", "HEADRACE_QUEUE", "HEADRACE_MODEL"} <= COMMAND_VARIABLES


def test_the_commands_know_the_variables_of_the_worker() -> None:
    """The two lists agree, although the command never imports the worker."""
    assert {PREFIX + name.upper() for name in WorkerSettings.model_fields} == WORKER_VARIABLES
    assert {PREFIX + name for name in OTHER_VARIABLES} == SHARED_VARIABLES
    assert {option.envvar for _, option in OPTIONS} <= COMMAND_VARIABLES | WORKER_VARIABLES


def test_misspelt_variables_are_all_named_with_the_nearest() -> None:
    """A command that looks at the wrong queue because of a typo would be worse than none."""
    check_variables({"HEADRACE_QUEUE": "a", "HEADRACE_DTYPE": "float32", "PATH": "/bin"})
    with pytest.raises(ConfigurationError) as refusal:
        check_variables({"HEADRACE_QUEU": "a", "HEADRACE_TEMPRATURE": "0"})
    assert "HEADRACE_QUEU: no such variable; the nearest is HEADRACE_QUEUE" in str(refusal.value)
    assert "the nearest is HEADRACE_TEMPERATURE" in str(refusal.value)


def test_only_given_sampling_options_are_set() -> None:
    """None and an empty list are what typer gives for a flag that is absent."""
    params = sampling_from(max_tokens=None, stop=[], temperature=0.0)
    assert (params.max_tokens, params.stop, params.temperature) == (256, (), 0.0)
    with pytest.raises(ConfigurationError, match="max_tokens must be"):
        sampling_from(max_tokens=0)


def test_durations_take_suffixes() -> None:
    """Text is read with its unit, a default passes, nonsense is named."""
    assert (duration("2m"), duration(1.5)) == (120.0, 1.5)
    with pytest.raises(typer.BadParameter, match="'soon'"):
        duration("soon")


@pytest.mark.parametrize(
    ("arguments", "environ", "found"),
    [
        ([], {}, None),
        (["--redis-url", "redis://a"], {}, "redis://a"),
        (["--redis-url=redis://a"], {"HEADRACE_REDIS_URL": "redis://b"}, "redis://a"),
        (["--queue", "q"], {"HEADRACE_REDIS_URL": "redis://b"}, "redis://b"),
        (["--redis-url"], {"HEADRACE_REDIS_URL": ""}, None),
    ],
)
def test_a_setting_is_found_where_the_worker_will_find_it(
    arguments: list[str], environ: dict[str, str], found: str | None
) -> None:
    """A flag wins over its variable, and an empty variable is none."""
    assert setting("redis-url", arguments, environ) == found


def test_a_worker_without_a_model_gets_the_demo_model() -> None:
    """Any model that is given stands."""
    assert with_defaults([], {}) == ["--model", "smollm2-135m"]
    assert with_defaults(["--model", "m"], {}) == ["--model", "m"]
    assert with_defaults([], {"HEADRACE_MODEL": "m"}) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.TransportError("x"), ExitCode.UNREACHABLE),
        (errors.ProtocolError("x"), ExitCode.UNREACHABLE),
        (ConfigurationError("x"), ExitCode.USAGE),
        (errors.EngineFailure("x"), ExitCode.FAILED),
        (errors.InvalidRequest("x"), ExitCode.FAILED),
        (errors.FirstChunkTimeout("r", 1.0, "x"), ExitCode.FAILED),
        (CommandError("x"), ExitCode.FAILED),
    ],
)
def test_every_kind_of_error_has_its_exit_code(error: errors.HeadraceError, code: ExitCode) -> None:
    """Usage, Redis and requests can be told apart by a script."""
    assert exit_code_of(error) is code


async def send(number: signal.Signals) -> ExitCode:
    """Signal this process, and wait to be cancelled."""
    os.kill(os.getpid(), number)
    await asyncio.Event().wait()
    return ExitCode.OK


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_gives_128_and_its_number(number: signal.Signals) -> None:
    """The body is cancelled, and the shell learns by what."""
    before = signal.signal(number, signal.SIG_DFL)  # whoever started the tests may ignore it
    try:
        assert run(send(number)) == 128 + number
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals) -> None:
    """nohup keeps a command running when its terminal goes, and so does a script's "&"."""

    async def body() -> ExitCode:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)
        return ExitCode.OK

    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert run(body()) == ExitCode.OK
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_body_is_cancelled_until_it_heeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation that a library swallows is repeated."""
    monkeypatch.setattr("headrace.cli.running.CANCEL_AGAIN_S", 0.01)
    num_cancelled = 0

    async def stubborn() -> ExitCode:
        nonlocal num_cancelled
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                num_cancelled += 1
                if num_cancelled == 3:
                    raise

    assert run(stubborn()) == 130
    assert num_cancelled == 3


def test_a_helper_that_fails_ends_the_body() -> None:
    """A worker that cannot start is the command's failure, and the body hears of it first."""
    was_cancelled = False

    async def body() -> ExitCode:
        nonlocal was_cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled = True
            raise
        return ExitCode.OK

    async def helper() -> None:
        raise CommandError("no worker")

    with pytest.raises(CommandError, match="no worker"):
        run(body(), beside=helper())
    assert was_cancelled


def test_a_helper_is_stopped_after_the_body() -> None:
    """The worker stays while the command tidies up."""
    order: list[str] = []

    async def body() -> ExitCode:
        await asyncio.sleep(0)
        order.append("body")
        return ExitCode.FAILED

    async def helper() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append("helper")

    assert run(body(), beside=helper()) == ExitCode.FAILED
    assert order == ["body", "helper"]


async def test_a_swallowed_cancellation_is_heeded() -> None:
    """A task that was cancelled is told so, also after the exception was lost."""

    async def swallow() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heed_cancellation()

    task = asyncio.ensure_future(swallow())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    heed_cancellation()

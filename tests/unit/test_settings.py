"""Settings: flags win over variables, and everything that is wrong is said at once."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from headrace.errors import ConfigurationError
from headrace_worker.options import (
    OTHER_VARIABLES,
    SettingsError,
    flag,
    load_settings,
    parse,
    variable,
)
from headrace_worker.settings import WorkerSettings
from headrace_worker.wiring import engine_settings

URL = "redis://user:hunter2@queue:6379/0"
NEEDED = ("--redis-url", URL, "--model", "smollm2-135m")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the variables of whoever runs the tests."""
    for name in list(os.environ):
        if name.upper().startswith("HEADRACE_"):
            monkeypatch.delenv(name)


def _problems(*argv: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        parse(argv)
    return caught.value.problems


def test_two_settings_are_needed_and_the_rest_has_defaults() -> None:
    """URL and model are enough for a worker."""
    settings = parse(NEEDED)
    assert (settings.queue, settings.device, settings.max_num_seqs) == ("default", "auto", 256)
    assert settings.redis_url.get_secret_value() == URL
    assert (settings.lease_ttl, settings.drain_timeout, settings.metrics_port) == (15.0, 0.0, None)


def test_a_small_token_budget_takes_fewer_sequences_unless_their_number_is_given() -> None:
    """A budget below a number that was given would starve some; the refusal names both."""
    assert parse([*NEEDED, "--max-num-batched-tokens", "128"]).max_num_seqs == 128
    assert parse([*NEEDED, "--max-num-batched-tokens", "4096"]).max_num_seqs == 256
    (problem,) = _problems(*NEEDED, "--max-num-seqs", "64", "--max-num-batched-tokens", "32")
    assert "max_num_batched_tokens 32" in problem
    assert "max_num_seqs 64" in problem


def test_sizes_and_durations_take_suffixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From flags and from variables alike."""
    monkeypatch.setenv("HEADRACE_KV_CACHE_MEMORY", "24MiB")
    monkeypatch.setenv("HEADRACE_FLUSH_INTERVAL", "20ms")
    settings = parse([*NEEDED, "--lease-ttl", "2m", "--drain-timeout", "20s"])
    assert settings.kv_cache_memory == 24 * 1024**2
    assert settings.flush_interval == pytest.approx(0.02)
    assert (settings.lease_ttl, settings.drain_timeout) == (120.0, 20.0)


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line is the more deliberate of the two."""
    monkeypatch.setenv("HEADRACE_QUEUE", "from-environment")
    assert parse(NEEDED).queue == "from-environment"
    assert parse([*NEEDED, "--queue", "from-flag"]).queue == "from-flag"


def test_an_empty_variable_is_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files pass unset variables on as empty ones."""
    monkeypatch.setenv("HEADRACE_MAX_MODEL_LEN", "")
    assert parse(NEEDED).max_model_len is None


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), True),
        (("--no-enable-prefix-caching",), False),
        (("--enable-prefix-caching",), True),
    ],
)
def test_switches_go_both_ways(argv: tuple[str, ...], expected: bool) -> None:
    """A switch can be turned off again where a variable turned it on."""
    assert parse([*NEEDED, *argv]).enable_prefix_caching is expected


@pytest.mark.parametrize(
    ("argv", "cuda_graphs", "one_ahead"),
    [
        ((), True, None),
        (("--enforce-eager",), False, None),
        (("--no-async-scheduling",), True, False),
        (("--enforce-eager", "--no-async-scheduling"), False, False),
    ],
)
def test_a_gpu_can_be_told_to_take_plain_steps(
    argv: tuple[str, ...], cuda_graphs: bool, one_ahead: bool | None
) -> None:
    """Whoever looks for a fault there turns off graphs and steps scheduled ahead, one by one."""
    tokenizer = SimpleNamespace(vocab_size=64, eos_token_ids=(1,))
    engine = engine_settings(parse([*NEEDED, *argv]), Path("m"), tokenizer)  # type: ignore[arg-type]
    assert (engine.cuda_graphs, engine.one_ahead) == (cuda_graphs, one_ahead)


def test_what_is_missing_is_named_with_flag_and_variable() -> None:
    """Both ways to give it are in the message."""
    assert _problems() == (
        "--redis-url or HEADRACE_REDIS_URL is needed",
        "--model or HEADRACE_MODEL is needed",
    )


def test_all_problems_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its value and where it came from, so one round of repairs is enough."""
    monkeypatch.setenv("HEADRACE_LEASE_TTL", "soon")
    monkeypatch.setenv("HEADRACE_MODEL_LEN", "64")
    problems = _problems(*NEEDED, "--block-size", "x", "--quantization", "int3")
    assert len(problems) == 4
    assert problems[0].startswith("HEADRACE_MODEL_LEN: no such setting; the nearest is HEADRACE_")
    assert any(p.startswith("--block-size x: ") for p in problems)
    assert any(p.startswith("--quantization int3: ") for p in problems)
    assert any(p.startswith("HEADRACE_LEASE_TTL=soon: 'soon' is not a duration") for p in problems)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("redis_url", "http://queue"),
        ("redis_url", "redis://"),
        ("queue", "a queue"),
        ("model", ""),
        ("worker_id", "a worker"),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("dtype", "float8"),
        ("quantization", "awq"),
        ("model_impl", "vllm"),
        ("tensor_parallel_size", "0"),
        ("max_model_len", "1"),
        ("max_num_seqs", "0"),
        ("max_num_batched_tokens", "-1"),
        ("kv_cache_memory", "24M"),
        ("kv_cache_memory", "0"),
        ("gpu_memory_utilization", "0"),
        ("gpu_memory_utilization", "1.1"),
        ("gpu_memory_utilization", "nan"),
        ("block_size", "0"),
        ("reserve", "none"),
        ("num_threads", "0"),
        ("engine_hang_timeout", "0s"),
        ("lease_ttl", "100ms"),
        ("max_strikes", "0"),
        ("drain_timeout", "-1s"),
        ("flush_tokens", "0"),
        ("max_unsent_tokens", "0"),
        ("metrics_port", "65536"),
        ("log_level", "loud"),
        ("log_format", "xml"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: str) -> None:
    """The message begins with the flag and the value."""
    (problem,) = _problems(*NEEDED, f"{flag(name)}={value}")
    assert problem.startswith(f"{flag(name)} {value}: ")


@pytest.mark.parametrize(("name", "value"), [("model_impl", "transformers"), ("device", "cuda:1")])
def test_what_cannot_be_cut_over_ranks_is_refused(name: str, value: str) -> None:
    """Neither a model of transformers' own nor one GPU; both settings are named."""
    (problem,) = _problems(*NEEDED, "--tensor-parallel-size", "2", flag(name), value)
    assert "tensor_parallel_size 2" in problem
    assert f"{name} {value!r}" in problem
    assert getattr(parse([*NEEDED, flag(name), value]), name) == value


def test_an_unknown_variable_is_refused_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A typing mistake does not silently leave the default in place."""
    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQ", "8")
    monkeypatch.setenv("headrace_quque", "x")
    assert _problems(*NEEDED) == (
        "HEADRACE_MAX_NUM_SEQ: no such setting; the nearest is HEADRACE_MAX_NUM_SEQS",
        "headrace_quque: no such setting; the nearest is HEADRACE_QUEUE",
    )


def test_variables_of_the_command_line_tool_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker started by somebody with HEADRACE_STATE_DIR set is not refused for it."""
    for name in OTHER_VARIABLES:
        monkeypatch.setenv(f"HEADRACE_{name}", "x")
    assert parse(NEEDED).queue == "default"


def test_a_settings_error_is_a_configuration_error() -> None:
    """Callers of the whole project catch one class; its text has one line a problem."""
    with pytest.raises(ConfigurationError) as caught:
        load_settings({})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("url", ["http://user:hunter2@queue", ":hunter2@queue:6379"])
def test_passwords_are_not_shown(url: str) -> None:
    """Neither the settings' own text, nor a problem, nor its traceback has the password."""
    assert "hunter2" not in repr(parse(NEEDED)) + str(parse(NEEDED).model_dump())
    assert parse(NEEDED).redis_address == "redis://user:***@queue:6379/0"
    with pytest.raises(SettingsError) as caught:
        parse(["--redis-url", url, "--model", "m"])
    error: BaseException | None = caught.value
    assert error is not None
    assert "hunter2" not in str(error)
    assert error.__suppress_context__


def test_every_field_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--help lists each setting but the hidden one, and each has a description."""
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    for name, field in WorkerSettings.model_fields.items():
        assert (flag(name) in text) == (name != "engine_command")
        assert field.description


@pytest.mark.parametrize(
    "argument",
    [
        *("redis-url", "queue", "model", "device", "dtype", "max-model-len", "max-num-seqs"),
        *("max-num-batched-tokens", "kv-cache-memory", "gpu-memory-utilization", "block-size"),
        *("attention-backend", "quantization", "lease-ttl", "max-strikes", "drain-timeout"),
        *("exit-when-empty", "metrics-port", "served-model-name", "model-impl"),
        *("tensor-parallel-size", "enforce-eager", "async-scheduling"),
    ],
)
def test_the_published_flags_exist(argument: str) -> None:
    """Flags and variables that documents promise are those of the fields."""
    name = argument.replace("-", "_")
    assert name in WorkerSettings.model_fields
    assert (flag(name), variable(name)) == (f"--{argument}", f"HEADRACE_{name.upper()}")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("models/tiny", "models/tiny"),
        ("/models/tiny", "tiny"),
        ("/models/Tiny.Q4_1.gguf", "Tiny.Q4_1"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
    ],
)
def test_a_model_is_served_under_the_name_of_its_files(model: str, name: str) -> None:
    """A hub id keeps its owner; a name given by hand wins."""
    assert load_settings({"redis_url": URL, "model": model}).model_name == name
    given = {"redis_url": URL, "model": model, "served_model_name": "mine"}
    assert load_settings(given).model_name == "mine"


def test_every_process_has_a_name_of_its_own() -> None:
    """Two workers on one machine are two consumers."""
    one, two = parse(NEEDED), parse(NEEDED)
    assert one.worker_id != two.worker_id
    assert parse([*NEEDED, "--worker-id", "w-1"]).worker_id == "w-1"


def test_another_engine_process_is_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden setting is split as a shell splits."""
    monkeypatch.setenv("HEADRACE_ENGINE_COMMAND", "python -m 'my engine' --fast")
    assert parse(NEEDED).engine_command == ("python", "-m", "my engine", "--fast")


def test_settings_are_frozen() -> None:
    """Nobody changes them after the start."""
    settings: Any = parse(NEEDED)
    with pytest.raises(pydantic.ValidationError):
        settings.queue = "other"


def test_a_flag_is_not_guessed_from_its_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    """--redis is no flag: the headrace command would not see it, and serve another server."""
    with pytest.raises(SystemExit) as left:
        parse([*NEEDED, "--redis", "redis://other"])
    assert left.value.code == 2
    assert "--redis" in capsys.readouterr().err


def test_a_variable_that_nobody_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's deadline is no setting of a worker, and would be ignored."""
    monkeypatch.setenv("HEADRACE_DEADLINE", "5s")
    (problem,) = _problems(*NEEDED)
    assert "HEADRACE_DEADLINE: no such setting" in problem

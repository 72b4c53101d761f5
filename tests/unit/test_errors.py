"""The error tree: complete, drawn as it is, and fit to travel between processes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from headrace import errors
from headrace.errors import (
    CLASS_OF_CODE,
    MAX_MESSAGE_LENGTH,
    ConfigurationError,
    ErrorCode,
    FirstChunkTimeout,
    HeadraceError,
    InvalidRequest,
    Overloaded,
    RequestError,
    RequestTimeout,
    error_for,
)


def _tree(cls: type) -> dict[str, object]:
    """Read the classes of the module; the worker and the command add some of their own."""
    children = [c for c in cls.__subclasses__() if c.__module__ == errors.__name__]
    return {child.__name__: _tree(child) for child in children}


def _drawn_tree() -> dict[str, object]:
    """Read the tree that the module's docstring draws: four columns a level."""
    lines = inspect.getdoc(errors).splitlines()
    start = lines.index("HeadraceError")
    root: dict[str, object] = {}
    path = [root]
    for line in lines[start + 1 :]:
        mark = max(line.find("├"), line.find("└"))
        depth = mark // 4
        name = line[mark + 4 :].split()[0]
        path[depth + 1 :] = [{}]
        path[depth][name] = path[depth + 1]
    return root


def test_docstring_draws_the_real_tree() -> None:
    """The tree in the module's docstring is the tree of the classes."""
    assert _drawn_tree() == _tree(HeadraceError)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_a_class(code: ErrorCode) -> None:
    """Each code of the wire becomes a RequestError that keeps code, request and worker."""
    error = error_for(code, "no", request_id="r1", worker_id="w1")
    assert isinstance(error, RequestError)
    assert (error.code, error.request_id, error.worker_id) == (code, "r1", "w1")
    assert "r1" in str(error)
    assert "no" in str(error)


def test_table_has_no_row_too_many() -> None:
    """The table of codes holds the closed set and nothing else."""
    assert set(CLASS_OF_CODE) == set(ErrorCode)


@pytest.mark.parametrize("cls", sorted(set(CLASS_OF_CODE.values()), key=lambda c: c.__name__))
def test_default_code_belongs_to_its_class(cls: type[RequestError]) -> None:
    """An error raised without a code carries one that maps back to its own class."""
    assert CLASS_OF_CODE[cls("no").code] is cls


def test_only_faults_that_pass_are_retryable() -> None:
    """Overload, loss and a failed engine may be tried again; nothing else is worth it."""
    retryable = {cls.__name__ for cls in set(CLASS_OF_CODE.values()) if cls.retryable}
    assert retryable == {"Overloaded", "RequestLost", "EngineFailure"}


@pytest.mark.parametrize("cls", [ConfigurationError, InvalidRequest])
def test_wrong_arguments_are_value_errors(cls: type[Exception]) -> None:
    """Code that catches ValueError also catches wrong settings and parameters."""
    assert issubclass(cls, ValueError)


def test_timeouts_do_not_shadow_the_builtin() -> None:
    """No error of ours is named like, or caught as, the built-in TimeoutError."""
    assert not issubclass(RequestTimeout, TimeoutError)
    assert not hasattr(errors, "TimeoutError")


def test_overload_says_when_to_come_back() -> None:
    """Overloaded gives its delay under our name and under the one HTTP uses."""
    error = Overloaded("full", retry_after_s=2.5)
    assert error.retry_after_s == error.retry_after == 2.5


@pytest.mark.parametrize(
    "error",
    [
        FirstChunkTimeout("r1", 2.0, "the first chunk"),
        Overloaded("full", request_id="r1", retry_after_s=3.0),
        error_for(ErrorCode.ENGINE_FAILURE, "no", request_id="r1", worker_id="w"),
    ],
)
def test_errors_survive_pickling(error: HeadraceError) -> None:
    """An error sent to another process arrives with its text and its facts."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_message_with_a_huge_value_is_cut() -> None:
    """A message that would quote megabytes keeps its beginning only."""
    error = InvalidRequest(f"prompt {'x' * 10_000_000!r}")
    assert len(error.message) == MAX_MESSAGE_LENGTH
    assert error.message.startswith("prompt 'xxx")

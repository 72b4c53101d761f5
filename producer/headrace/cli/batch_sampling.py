"""The sampling options of an OpenAI batch body, in the spellings of OpenAI, vLLM and our own.

Where two spellings of one option disagree, the line is refused: to choose one would be a guess.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from headrace.checks import shown
from headrace.errors import InvalidRequest
from headrace.sampling import SamplingParams

COMPLETIONS_MAX_TOKENS = 16
"""What the OpenAI API takes when a completions body names no ``max_tokens``."""

INCLUDE_STOP = "include_stop_str_in_output"  # what vLLM calls include_stop

GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "structured_outputs")
"""Older and newer names of vLLM for what response_format says."""

# Those whose spelling differs between the APIs are mapped below.
_SAME_EVERYWHERE = {field.name for field in fields(SamplingParams)} - {
    *("max_tokens", "logprobs", "echo", "include_stop", "response_format"),
}

SAMPLING_FIELDS = _SAME_EVERYWHERE | {
    *("max_tokens", "logprobs", "include_stop", INCLUDE_STOP, "response_format"),
    *GUIDED_FIELDS,
}
"""Fields that become sampling options in both APIs."""


def read_sampling(
    given: Mapping[str, Any], is_chat: bool, default_max_tokens: int | None
) -> SamplingParams:
    """Return the options of a body without nulls; raises InvalidRequest that names the field."""
    options = {name: value for name, value in given.items() if name in _SAME_EVERYWHERE}
    options["max_tokens"] = _max_tokens(given, is_chat, default_max_tokens)
    options["logprobs"] = _chat_logprobs(given) if is_chat else given.get("logprobs")
    options["include_stop"] = _include_stop(given)
    options["response_format"] = _response_format(given)
    if not is_chat:  # of a chat, vLLM means another thing by this word
        options["echo"] = given.get("echo", False)
        if options["echo"] is True:  # the logprobs of an echoed text begin with the prompt's
            options.setdefault("prompt_logprobs", options["logprobs"])
    return SamplingParams.from_wire(options)


def _max_tokens(given: Mapping[str, Any], is_chat: bool, default: int | None) -> object:
    old, new = given.get("max_tokens"), given.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise InvalidRequest(f"max_tokens {old!r} and max_completion_tokens {new!r} disagree")
    limit = new if new is not None else old
    if limit is not None:
        return limit
    return default if default is not None or is_chat else COMPLETIONS_MAX_TOKENS


def _chat_logprobs(given: Mapping[str, Any]) -> object:
    wanted, top = given.get("logprobs", False), given.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise InvalidRequest(f"logprobs must be true or false, not {shown(wanted)}")
    if not wanted:
        if top is not None and not (type(top) is int and top == 0):
            raise InvalidRequest(f"top_logprobs {shown(top)} needs logprobs = true")
        return None
    if top is None:
        return 0
    if isinstance(top, bool) or not isinstance(top, int):  # named as the asker named it
        raise InvalidRequest(f"top_logprobs must be a whole number, not {shown(top)}")
    return top


def _include_stop(given: Mapping[str, Any]) -> object:
    ours, theirs = given.get("include_stop"), given.get(INCLUDE_STOP)
    if ours is not None and theirs is not None and ours is not theirs:
        raise InvalidRequest(
            f"include_stop {shown(ours)} and {INCLUDE_STOP} {shown(theirs)} disagree"
        )
    if theirs is not None and not isinstance(theirs, bool):
        raise InvalidRequest(f"{INCLUDE_STOP} must be true or false, not {shown(theirs)}")
    return next((value for value in (ours, theirs) if value is not None), False)


def _response_format(given: Mapping[str, Any]) -> object:
    form = given.get("response_format")
    forms = {} if form is None or form == {"type": "text"} else {"response_format": form}
    for name in GUIDED_FIELDS:
        if name in given:
            forms[name] = _FORMS[name](given[name])
    if len(forms) > 1:
        raise InvalidRequest(f"give exactly one of {sorted(forms)}, not {len(forms)}")
    return next(iter(forms.values()), None)


def _guided_json(schema: object) -> dict[str, Any]:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"guided_json is not JSON: {error}") from error
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _guided_regex(regex: object) -> dict[str, Any]:
    return {"type": "regex", "regex": regex}


def _guided_choice(choice: object) -> dict[str, Any]:
    return {"type": "choice", "choice": choice}


def _structured_outputs(outputs: object) -> dict[str, Any]:
    if not isinstance(outputs, dict):
        raise InvalidRequest(f"structured_outputs must be an object, not {shown(outputs)}")
    wanted = {name: v for name, v in outputs.items() if v is not None and v is not False}
    for name, value in wanted.items():
        if name not in _OUTPUTS:
            raise InvalidRequest(f"structured_outputs.{name} = {shown(value)} is not supported")
    if len(wanted) != 1:
        raise InvalidRequest(
            f"structured_outputs must hold exactly one of {list(_OUTPUTS)}, not {shown(outputs)}"
        )
    ((name, value),) = wanted.items()
    return _OUTPUTS[name](value)


def _json_object(wanted: object) -> dict[str, Any]:
    if wanted is not True:
        raise InvalidRequest(f"structured_outputs.json_object must be true, not {shown(wanted)}")
    return {"type": "json_object"}


_Form = Callable[[object], dict[str, Any]]
_OUTPUTS: dict[str, _Form] = {
    "json": _guided_json,
    "regex": _guided_regex,
    "choice": _guided_choice,
    "json_object": _json_object,
}
_FORMS: dict[str, _Form] = {
    "guided_json": _guided_json,
    "guided_regex": _guided_regex,
    "guided_choice": _guided_choice,
    "structured_outputs": _structured_outputs,
}

"""Options of batch lines: each spelling of OpenAI and vLLM becomes one option of ours."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.batch_body import CHAT_URL, COMPLETIONS_URL, BatchBody, read_body
from headrace.cli.batch_sampling import SAMPLING_FIELDS
from headrace.errors import InvalidRequest
from headrace.sampling import SamplingParams

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
REGEX_FORMAT = {"type": "regex", "regex": "a+"}
CHOICE_FORMAT = {"type": "choice", "choice": ["a", "b"]}


def chat(**body: Any) -> BatchBody:
    """Read a chat body."""
    return read_body(CHAT_URL, CHAT | body)


def completion(**body: Any) -> BatchBody:
    """Read a completions body."""
    return read_body(COMPLETIONS_URL, TEXT | body)


@pytest.mark.parametrize(
    ("given", "option", "value"),
    [
        ({"top_k": 40}, "top_k", 40),
        ({"top_k": -1}, "top_k", 0),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"repetition_penalty": 1.1}, "repetition_penalty", 1.1),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"stop_token_ids": [2]}, "stop_token_ids", (2,)),
        ({"bad_words": ["no"]}, "bad_words", ("no",)),
        ({"prompt_logprobs": 5}, "prompt_logprobs", 5),
        ({"include_stop": True}, "include_stop", True),
        ({"include_stop_str_in_output": True}, "include_stop", True),
        ({"include_stop": True, "include_stop_str_in_output": True}, "include_stop", True),
        ({"response_format": {"type": "text"}}, "response_format", None),
        ({"response_format": {"type": "json_object"}}, "response_format", {"type": "json_object"}),
        ({"response_format": SCHEMA_FORMAT}, "response_format", SCHEMA_FORMAT),
        ({"guided_json": SCHEMA}, "response_format", SCHEMA_FORMAT),
        ({"guided_json": '{"type": "object"}'}, "response_format",
         {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}),
        ({"guided_regex": "a+"}, "response_format", REGEX_FORMAT),
        ({"guided_choice": ["a", "b"]}, "response_format", CHOICE_FORMAT),
        ({"structured_outputs": {"json": SCHEMA}}, "response_format", SCHEMA_FORMAT),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "response_format", REGEX_FORMAT),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "response_format", CHOICE_FORMAT),
        ({"structured_outputs": {"json_object": True, "disable_fallback": False}},
         "response_format", {"type": "json_object"}),
        ({"guided_regex": "a+", "response_format": {"type": "text"}},
         "response_format", REGEX_FORMAT),
    ],
)  # fmt: skip
def test_each_spelling_is_one_option(given: dict[str, Any], option: str, value: object) -> None:
    """What a chat body and a completions body call an option means the same in both."""
    assert getattr(chat(**given).sampling, option) == value
    assert getattr(completion(**given).sampling, option) == value


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"top_k": -2}, "top_k must be a whole number"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"temperature": "0.7"}, "temperature must be a finite number, not '0.7'"),
        ({"temperature": True}, "temperature must be a finite number, not True"),
        ({"temperature": float("inf")}, "temperature must be a finite number, not inf"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be a whole number"),
        ({"bad_words": [7]}, "bad_words must hold strings"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output must be true or false"),
        ({"include_stop": False, "include_stop_str_in_output": True}, "disagree"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type must be one of"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema must be a map"),
        ({"response_format": "json"}, "response_format must be a map, not 'json'"),
        ({"guided_json": "{"}, "guided_json is not JSON"),
        ({"guided_json": "[" * 100_000}, "guided_json is not JSON"),
        ({"guided_json": [1]}, "json_schema.schema must be a map, not [1]"),
        ({"guided_regex": ""}, "response_format.regex must be text, not ''"),
        ({"guided_choice": []}, "response_format.choice is empty"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "['guided_choice', 'guided_regex']"),
        (
            {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
            "give exactly one of",
        ),
        ({"guided_grammar": "root ::= x"}, "'guided_grammar' is not supported"),
        ({"structured_outputs": "json"}, "structured_outputs must be an object, not 'json'"),
        ({"structured_outputs": {}}, "structured_outputs must hold exactly one of"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "must hold exactly one of"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar = 'x' is not"),
        ({"structured_outputs": {"json_object": 1}}, "json_object must be true, not 1"),
        ({"tool_choice": "required"}, "tool_choice = 'required' is not supported"),
        ({"n": 0}, "n must be a whole number"),
        ({"n": 0.5}, "n must be a whole number"),
    ],
)
def test_bad_options_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    """What cannot be mapped is refused with the field as it was spelt, in both APIs."""
    for read in (chat, completion):
        with pytest.raises(InvalidRequest) as caught:
            read(**given)
        assert named in caught.value.message


def test_no_option_of_ours_is_out_of_reach() -> None:
    """Whatever a client can ask for, a line can, but for echo, which only completions have."""
    names = set(SamplingParams.__dataclass_fields__)
    assert names - SAMPLING_FIELDS == {"echo"}
    assert completion(echo=True).sampling.echo is True


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_tools_go_to_the_template(choice: dict[str, Any]) -> None:
    """Tools are shown to the model unless the line says not to."""
    assert chat(tools=[TOOL], **choice).tools == (TOOL,)
    assert chat(tools=[TOOL], tool_choice="none").tools == ()


def test_a_completions_line_has_no_template() -> None:
    """Tools and variables of a template that is not rendered are refused, an empty list is not."""
    assert completion(tools=[]).tools == ()
    for extra in ({"tools": [TOOL]}, {"chat_template_kwargs": {"x": 1}}):
        with pytest.raises(InvalidRequest, match=next(iter(extra))):
            completion(**extra)


def test_variables_go_to_the_template() -> None:
    """What vLLM takes as chat_template_kwargs is taken as it is, and content parts are kept."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    body = chat(messages=parts, chat_template_kwargs={"enable_thinking": False})
    assert body.chat_template_kwargs == {"enable_thinking": False}
    assert body.messages == parts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"echo": True}, (None, None)),
        ({"logprobs": 2}, (2, None)),
        ({"echo": True, "logprobs": 2}, (2, 2)),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 0}, (2, 0)),
        ({"echo": False, "logprobs": 2}, (2, None)),
    ],
)
def test_logprobs_of_an_echoed_text_cover_the_prompt(
    given: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    """With echo, logprobs asks for those of the prompt, too, as in the OpenAI API."""
    sampling = completion(**given).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == expected


VLLM_DEFAULTS: dict[str, Any] = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
CHAT_DEFAULTS = {"add_generation_prompt": True, "continue_final_message": False}


def test_a_body_may_spell_out_vllm_s_defaults() -> None:
    """They ask for nothing; another value does, and is refused by name."""
    assert chat(**VLLM_DEFAULTS, **CHAT_DEFAULTS, add_special_tokens=False) == chat()
    assert completion(**VLLM_DEFAULTS, add_special_tokens=True) == completion()
    for name, value in (VLLM_DEFAULTS | CHAT_DEFAULTS).items():
        with pytest.raises(InvalidRequest, match=f"{name} = .* is not supported"):
            chat(**{name: not value})


def test_top_logprobs_of_zero_ask_for_nothing_without_logprobs() -> None:
    """vLLM's default is 0, so bodies that spell out every default hold it."""
    assert chat(logprobs=False, top_logprobs=0).sampling.logprobs is None
    with pytest.raises(InvalidRequest, match="top_logprobs 1 needs logprobs = true"):
        chat(logprobs=False, top_logprobs=1)


@pytest.mark.parametrize("top", [True, "3", 2.0, 21, -1])
def test_top_logprobs_are_a_whole_number(top: Any) -> None:
    """A count that is none is refused with a name that the line has."""
    with pytest.raises(InvalidRequest, match="logprobs must be a whole number"):
        chat(logprobs=True, top_logprobs=top)

"""The exact bytes of every message, so that releases on both sides of the wire can be mixed."""

from __future__ import annotations

import pytest

from headrace.errors import ErrorCode
from headrace.protocol import (
    ChunkMessage,
    RequestMessage,
    TerminalMessage,
    decode_chunk,
    decode_request,
    decode_terminal,
    encode_chunk,
    encode_request,
    encode_terminal,
)
from headrace.sampling import SamplingParams
from headrace.types import FinishReason, Timings, TokenLogprob, Usage

# Bytes that released clients and workers exchange. A change here is a new protocol version.
GOLDEN_REQUESTS = {
    "TEXT": RequestMessage("order-42", "acme", SamplingParams(seed=7), prompt="Hi"),
    "IDS": RequestMessage("r", "default", SamplingParams(), prompt=(1, 300, 70000)),
    "CHAT": RequestMessage(
        "r/1",
        "default",
        SamplingParams(
            max_tokens=None,
            temperature=0.5,
            stop=("\n",),
            stop_token_ids=(2,),
            logit_bias={5: -100.0},
            ignore_eos=True,
        ),
        messages=({"role": "user", "content": "Grüß dich"},),
        model="smollm2",
        metadata={"trace": "t1"},
    ),
    "TOOLS": RequestMessage(
        "r",
        "t",
        SamplingParams(
            include_stop=True,
            bad_words=("no",),
            prompt_logprobs=0,
            echo=True,
            response_format={"type": "choice", "choice": ["a", "b"]},
        ),
        messages=({"role": "user", "content": "Hi"},),
        tools=({"type": "function"},),
        chat_template_kwargs={"x": False},
    ),
}
GOLDEN_CHUNKS = {
    "PLAIN": ChunkMessage((10, 49151), ("", "é")),
    "LOGPROBS": ChunkMessage((5,), ("a",), (TokenLogprob(5, -0.5, ((5, -0.5), (9, -1.25))),)),
}
GOLDEN_TERMINALS = {
    "STOP": TerminalMessage(
        FinishReason.STOP,
        text="!",
        usage=Usage(3, 2, 1),
        timings=Timings(0.25, 0.5, None, 1.0),
        worker_id="w1",
    ),
    "ERROR": TerminalMessage(
        FinishReason.ERROR, error_code=ErrorCode.UNKNOWN_MODEL, error_message="no 'x'"
    ),
    "CANCELLED": TerminalMessage(FinishReason.CANCELLED, error_code=ErrorCode.CANCELLED),
    "PROMPT": TerminalMessage(
        FinishReason.STOP, prompt_logprobs=(None, TokenLogprob(5, -0.5, ((9, -0.25),)))
    ),
}
HEX = {
    "TEXT": "85a17601a26964a86f726465722d3432a174a461636d65a170a24869a17381a47365656407",
    "IDS": "84a17601a26964a172a174a764656661756c74a1709301cd012cce00011170",
    "CHAT": (
        "87a17601a26964a3722f31a174a764656661756c74a16d9182a4726f6c65a475736572a7636f6e74"
        "656e74ab4772c3bcc39f2064696368a17386aa6d61785f746f6b656e73c0ab74656d706572617475"
        "7265cb3fe0000000000000a473746f7091a10aae73746f705f746f6b656e5f6964739102aa6c6f67"
        "69745f626961738105cbc059000000000000aa69676e6f72655f656f73c3a56d6f64656ca7736d6f"
        "6c6c6d32a46d65746181a57472616365a27431"
    ),
    "TOOLS": (
        "87a17601a26964a172a174a174a16d9182a4726f6c65a475736572a7636f6e74656e74a24869a17385ac"
        "696e636c7564655f73746f70c3a96261645f776f72647391a26e6faf70726f6d70745f6c6f6770726f62"
        "7300a46563686fc3af726573706f6e73655f666f726d617482a474797065a663686f696365a663686f69"
        "636592a161a162a5746f6f6c739181a474797065a866756e6374696f6ea4746d706c81a178c2"
    ),
    "PLAIN": "92920acdbfff92a0a2c3a9",
    "LOGPROBS": "93910591a161919605cbbfe000000000000005cbbfe000000000000009cbbff4000000000000",
    "STOP": (
        "86a17601a6726561736f6ea473746f70a474657874a121a5757361676593030201a574696d657394"
        "cb3fd0000000000000cb3fe0000000000000c0cb3ff0000000000000a6776f726b6572a27731"
    ),
    "ERROR": (
        "84a17601a6726561736f6ea56572726f72a4636f6465ad756e6b6e6f776e5f6d6f64656ca5657272"
        "6f72a66e6f20277827"
    ),
    "CANCELLED": (
        "84a17601a6726561736f6ea963616e63656c6c6564a4636f6465a963616e63656c6c6564a56572726f72a0"
    ),
    "PROMPT": (
        "83a17601a6726561736f6ea473746f70a3706c7092c09405cbbfe000000000000009cbbfd0000000000000"
    ),
}


@pytest.mark.parametrize("name", GOLDEN_REQUESTS)
def test_request_has_its_golden_bytes(name: str) -> None:
    """A request is encoded to, and decoded from, exactly the committed bytes."""
    message = GOLDEN_REQUESTS[name]
    assert encode_request(message).hex() == HEX[name]
    assert decode_request(bytes.fromhex(HEX[name])) == message


@pytest.mark.parametrize("name", GOLDEN_CHUNKS)
def test_chunk_has_its_golden_bytes(name: str) -> None:
    """A chunk is encoded to, and decoded from, exactly the committed bytes."""
    message = GOLDEN_CHUNKS[name]
    assert encode_chunk(message).hex() == HEX[name]
    assert decode_chunk(bytes.fromhex(HEX[name])) == message


@pytest.mark.parametrize("name", GOLDEN_TERMINALS)
def test_terminal_has_its_golden_bytes(name: str) -> None:
    """A terminal entry is encoded to, and decoded from, exactly the committed bytes."""
    message = GOLDEN_TERMINALS[name]
    assert encode_terminal(message).hex() == HEX[name]
    assert decode_terminal(bytes.fromhex(HEX[name])) == message

from __future__ import annotations

import struct

import msgspec
import pytest

from atom.runtime.types import Logprobs, RequestOptions
from atom.sampling_params import SamplingParams
from atom.serve.engine.frames import encode
from atom.serve.engine.protocol import Abort, Finish, Output, Outputs, Ready, Submit, from_engine, to_engine

SUBMIT = Submit(
    "cmpl-1",
    [1, 2],
    SamplingParams(max_tokens=3, logit_bias={5: 1.5}, stop_strings=["é"]),
    RequestOptions(b"\0salt", -2),
)
FINISH = Finish("error", 2, 1, 0.5, "stop", "RequestError: no")
SCORED = Output("cmpl-1", 0, "", [], prompt_logprobs=[None, Logprobs(2, -1.0, 1, [(2, -1.0)])])
OUTPUTS = Outputs([SCORED, Output("cmpl-1", 0, "é", [7], [Logprobs(7, -0.5, 1, [])], FINISH)], 3, {"": 4})


def test_a_message_comes_out_as_it_went_in():
    (submit,) = to_engine().feed(encode(SUBMIT))
    assert isinstance(submit, Submit)
    assert (submit.id, submit.prompt, submit.params) == ("cmpl-1", [1, 2], SUBMIT.params)
    assert submit.options == RequestOptions(b"\0salt", -2)
    assert from_engine().feed(encode(OUTPUTS)) == [OUTPUTS]


def test_halves_of_surrogate_pairs_are_replaced_in_what_is_sent_and_nothing_else():
    finish = Finish("error", 2, 1, 0.5, None, "ValueError: \udc80")
    output = Output("cmpl-1", 0, "é \ud83d \ude00a\ud83d\ude00", [7], [Logprobs(7, -0.5, 1, [(7, -0.5)])], finish)
    output.embedding = b"\xff\xd8"
    (message,) = from_engine().feed(encode(Outputs([output], 3, {"\ud800": 4})))
    finish.error, output.text = "ValueError: \ufffd", "é \ufffd \ufffda\U0001f600"
    assert message == Outputs([output], 3, {"\ufffd": 4})


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_bytes_come_in_any_portions(size: int):
    sent = [Abort("a"), Abort("b" * 300), Abort("c")]
    data = b"".join(map(encode, sent))
    frames = to_engine()
    found = [message for at in range(0, len(data), size) for message in frames.feed(data[at : at + size])]
    assert found == sent


def test_a_frame_is_its_length_and_its_body():
    data = encode(Ready(9, "1 x A GPU"))
    assert struct.unpack("<I", data[:4]) == (len(data) - 4,)
    assert msgspec.msgpack.decode(data[4:]) == ["Ready", 9, "1 x A GPU"]


def test_what_is_no_frame_of_ours_is_refused():
    with pytest.raises(ValueError, match="not a message of ours"):
        to_engine().feed(b"\xff\xff\xff\xff")
    with pytest.raises(msgspec.ValidationError):
        to_engine().feed(encode(Ready(9)))  # goes the other way

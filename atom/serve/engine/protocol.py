"""Messages between the HTTP process and the engine process.

Both directions share one socket. The first message to the engine is `frames.Start`.

    link.send(encode(Submit("cmpl-1", [1, 2, 3], SamplingParams(max_tokens=8))))
    for message in from_engine().feed(data):
        ...
"""

from __future__ import annotations

import msgspec

from atom.runtime.metrics import DEFAULT_VERSION, EngineStats
from atom.runtime.types import NO_OPTIONS, Logprobs, PrefixHit, RequestOptions, WeightSpan
from atom.sampling_params import SamplingParams
from atom.serve.engine.frames import Frames, Message, Start


class Submit(Message):
    id: str
    prompt: list[int]
    params: SamplingParams
    options: RequestOptions = NO_OPTIONS


class Abort(Message):
    id: str


class Pause(Message):
    """Start no step until `Resume`; answered by a `Done` of the same id."""

    id: str
    mode: str  # abort | wait | keep
    clear_cache: bool


class Resume(Message):
    """Go on; answered by the same message."""

    id: str


class SetWeightVersion(Message):
    """Name the weights that sample from now on; answered by the same message."""

    id: str
    version: str


class InitWeightTransfer(Message):
    """Prepare for a trainer that sends weights; answered by the same message."""

    id: str
    info: bytes  # vLLM's init_info, in msgpack


class StartWeightUpdate(Message):
    """Begin an update of several parts; answered by the same message."""

    id: str


class UpdateWeights(Message):
    """Update weights, all or a part of those that are to be; answered by the same message."""

    id: str
    info: bytes  # vLLM's update_info, in msgpack


class FinishWeightUpdate(Message):
    """End an update of several parts; answered by the same message."""

    id: str
    version: str | None  # the name of the weights; None: the number of updates so far


class Profile(Message):
    """Start or stop the profiler; answered by a `Done` of the same id."""

    id: str
    starts: bool


class LoadAdapter(Message):
    """Load a LoRA adapter; answered by a `Done` of the same id."""

    id: str
    name: str
    path: str  # of its folder


class UnloadAdapter(Message):
    """Drop a LoRA adapter; answered by the same message."""

    id: str
    name: str


class Sleep(Message):
    """Give up the memory of weights and KV; answered by a `Done` of the same id."""

    id: str
    level: int
    mode: str  # abort | wait | keep


class WakeUp(Message):
    """Take the memory again; answered by the same message."""

    id: str
    tags: list[str] | None  # weights, kv_cache; None: both


class ResetPrefixCache(Message):
    """Forget the KV of all prompts; answered by the same message."""

    id: str


class End(Message):
    """End in order: keep what is to be kept. If the socket ends without it or after it, the HTTP process has ended."""


class Finish(msgspec.Struct, array_like=True, gc=False):
    """The end of one sequence."""

    reason: str  # eos | max_tokens | stop_sequence | stop_{id} | repetition | abort | error
    num_output: int  # tokens
    num_cached: int  # prompt tokens that the prefix cache gave
    queue: float  # seconds from its arrival in the engine to its admission
    stop_string: str | None = None  # the stop string that was met
    error: str | None = None  # the message, if the reason is error
    num_accepted: int = 0  # tokens that were drafted
    prefill: float = 0.0  # seconds from its admission to its first token
    decode: float = 0.0  # seconds from there to its last
    num_preemptions: int = 0
    weight_versions: list[WeightSpan] = []  # of the tokens


class Admitted(msgspec.Struct, array_like=True, gc=False):
    """What the prefix cache gave a sequence when it was admitted."""

    num_cached: int  # prompt tokens
    hit: PrefixHit | None = None  # where that ended, if the request asks for it


class Tapped(msgspec.Struct, array_like=True, gc=False):
    """The hidden states of a tap."""

    shape: tuple[int, ...]  # [H], or [tokens, H]; of several streams [S, H] in place of H
    data: bytes  # fp32


class Output(msgspec.Struct, array_like=True, gc=False):
    """New output of one sequence."""

    id: str
    index: int  # among the request's sequences
    text: str | None  # None without a tokenizer
    tokens: list[int]
    logprobs: list[Logprobs] | None = None
    finish: Finish | None = None
    prompt_logprobs: list[Logprobs | None] | None = None  # of the next positions of the prompt
    embedding: bytes | None = None  # fp32[H], at the end
    admitted: Admitted | None = None  # with the first output
    taps: dict[str, Tapped] | None = None  # by names of layers, at the end


class Ready(Message):
    """The model is loaded."""

    num_blocks: int  # of the KV pool
    gpus: str = ""  # their number and names; "" on a CPU


class Outputs(Message):
    """The outputs of a step, and which Submits the engine has received."""

    outputs: list[Output]
    num_seen: int  # Submit messages received so far
    num_waiting: dict[str, int]  # sequences of these that are not admitted, by tenant


class Refused(Message):
    """A request is refused; nothing else follows for its id."""

    id: str
    error: str  # "": an internal error; the engine's log has it


class Done(Message):
    """Reports that an operator's request is done, or has failed with `error`. result: the path of a written file"""

    id: str
    result: str
    error: str = ""
    is_internal: bool = False  # the error is nothing that an operator can mend; the engine's log has it
    is_sleeping: bool = False  # the engine, since; what fails half-way may leave it so
    is_paused: bool = False  # the engine starts no step, since
    weight_version: str = DEFAULT_VERSION  # the engine's, since
    weights_fault: str = ""  # why the engine serves nothing, since


class Beat(Message):
    """The heartbeat of the engine's process, sent by a thread of its own."""

    stats: EngineStats
    doing: str = ""  # the present step of the start, as in `compiling 12 pieces: 3 done`
    step_seconds: float = 0.0  # since the step that runs has begun; 0: none runs
    stopped_ranks: list[int] = msgspec.field(default_factory=list)


class Failed(Message):
    """The engine has failed; its process ends."""

    kind: str  # the class of the error
    error: str
    exit_code: int


ToEngine = (
    Start | Submit | Abort | Pause | Resume | SetWeightVersion | InitWeightTransfer | StartWeightUpdate
    | UpdateWeights | FinishWeightUpdate | Profile | LoadAdapter | UnloadAdapter | Sleep | WakeUp
    | ResetPrefixCache | End
)  # fmt: skip
FromEngine = Ready | Outputs | Refused | Done | Beat | Failed


def to_engine() -> Frames[ToEngine]:
    return Frames(msgspec.msgpack.Decoder(ToEngine))


def from_engine() -> Frames[FromEngine]:
    return Frames(msgspec.msgpack.Decoder(FromEngine))

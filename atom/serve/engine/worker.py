"""The engine process: load a model, run steps, answer the HTTP process.

It is run as `python -m atom.serve.engine.worker FD`, where FD is the socket to the HTTP process.

    worker = Worker(link)
    threading.Thread(target=worker.receive, daemon=True).start()
    worker.load(lambda: open_real(start, worker.progress), start.config.device)
    worker.run()                                   # until the HTTP process ends, or has it end

It has four threads. One reads messages and prepares requests, so that a bad or long prompt never delays a step; one
prepares those with a grammar, which may take seconds to compile; the main thread loads the model and runs the steps;
one sends heartbeats (`atom.process.liveness`). The main thread imports torch at once, as the configuration may come
later.

It ignores the signals of a terminal or a supervisor, since the HTTP process decides when the last request is done, and
ends with the compilers that it has started: when it is asked to, with the KV that is to be kept in files; and when the
socket ends, within `GRACE_SECONDS` and without that, since a new server may want its GPU.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import msgpack

from atom.checkpoint import Progress, RichProgress, WatchedProgress
from atom.config import Config
from atom.config.parallel import devices_of
from atom.devices import open_early
from atom.errors import AtomError, RequestError
from atom.measurement.phases import PhaseClock, seconds_since_exec
from atom.process.child_process import end_children, end_group, limit_end
from atom.process.gc_utils import no_collection, settle
from atom.runtime.draft.speculation import DraftLog
from atom.runtime.metrics import DEFAULT_VERSION, EngineStats
from atom.runtime.requests.inbox import Inbox, Urgent, Work
from atom.runtime.step.guard import StepGuard
from atom.runtime.types import Logprobs, RequestOutput, Sequence
from atom.serve.engine.frames import Start
from atom.serve.engine.grammar_queue import GrammarQueue
from atom.serve.engine.link import Link, fail, send_heartbeats
from atom.serve.engine.protocol import (
    Abort,
    Admitted,
    Beat,
    Done,
    End,
    Finish,
    FinishWeightUpdate,
    InitWeightTransfer,
    LoadAdapter,
    Output,
    Outputs,
    Pause,
    Profile,
    Ready,
    Refused,
    ResetPrefixCache,
    Resume,
    SetWeightVersion,
    Sleep,
    StartWeightUpdate,
    Submit,
    Tapped,
    ToEngine,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
)
from atom.serve.ops import log

if TYPE_CHECKING:
    from atom.runtime.engine import Engine

LOG = logging.getLogger("atom.engine")
PORTION = 1024  # positions of a prompt whose log probabilities are sent in one message
GRACE_SECONDS = 2.0  # to end in when the HTTP process is gone, or for the last step when it has this one end

Open = Callable[[Start, Progress], "Engine"]


class Worker:
    """Runs the engine. `receive` needs a thread of its own; any thread may call `make_heartbeat`."""

    def __init__(self, link: Link) -> None:
        self.progress = WatchedProgress(RichProgress())
        self._link = link
        self._engine: Engine | None = None
        self._inbox = Inbox()
        self._outputs: list[Output] = []
        self._num_seen = 0
        self._grammars = GrammarQueue(self._prepare_grammar)
        self._compiling: dict[str, Submit] = {}  # requests whose grammars are not compiled, by id; of the main thread
        self._sent_state: tuple[int, dict[str, int]] = 0, {}  # last sent: `_num_seen`, and those that wait by tenant
        self._drafts = DraftLog()
        self._step_began: float | None = None  # when the step that runs did; None: none runs
        self._last_step: threading.Timer | None = None  # kills the process

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "requests come once the engine is ready"
        return self._engine

    def make_heartbeat(self) -> Beat:
        if self._engine is None:
            return Beat(EngineStats(), self.progress.doing or "opening the model")
        stats = self._engine.stats()
        stats.num_deferred += sum(message.params.n for message in list(self._compiling.values()))
        if line := self._drafts.describe(stats.scheduler):
            LOG.info(line)
        began = self._step_began
        step_seconds = 0.0 if began is None else time.monotonic() - began
        return Beat(stats, step_seconds=step_seconds, stopped_ranks=self._engine.stopped_ranks)

    def load(
        self,
        make: Callable[[], Engine],
        device: str = "cpu",
        *,
        is_paused: bool = False,
        weight_version: str = DEFAULT_VERSION,
    ) -> None:
        """Open the engine. is_paused: it starts no step until it is resumed"""
        self._engine = make()
        self._engine.weight_version = weight_version
        if is_paused:
            self._engine.pause("keep")
        self._engine.grammars.try_open()  # waits for the thread that does: no request is held up by it later
        self._engine.watch(lambda error: self._inbox.put(functools.partial(_raise, error)))
        settle()
        self._link.send(Ready(self._engine.stats().num_blocks, "" if device == "cpu" else describe_gpus()))

    def run(self) -> None:
        """Serve until the HTTP process has this process end."""
        guard = StepGuard(self.engine)
        while self._run_inbox():
            if self.engine.has_work:
                self._step_began = time.monotonic()
                guard.step(self._send_outputs)
                self._step_began = None
            self._send_outputs()

    def receive(self) -> None:
        """Receive messages until the socket ends; then end the process, whatever it is doing."""
        threading.Thread(target=self._grammars.run, name="grammars", daemon=True).start()
        try:
            while True:
                for message in self._link.receive():
                    if isinstance(message, End):
                        self._last_step = self._limit_end()  # it may take minutes
                        self._inbox.put(None)
                    else:
                        self._inbox.put(self._prepare(message))
        except (EOFError, OSError):
            self._limit_end()
            self.engine.stop_keeping()
            self._inbox.put(None)
        except Exception as error:
            LOG.exception("the engine cannot go on")
            fail(self._link, error, 1)
            log.flush()
            end_group()

    def close(self, seconds: float) -> None:
        """Close the engine; it may take this many seconds to write KV that is to be kept."""
        if self._last_step is not None:
            self._last_step.cancel()
        limit_end(seconds + GRACE_SECONDS)
        self.engine.close()

    def _limit_end(self) -> threading.Timer:
        if self._engine is None:
            end_group()  # a half-loaded model need not be closed
        return limit_end(GRACE_SECONDS)

    def _send_outputs(self) -> None:
        """Send outputs and state if they changed. Before a step too: else its admissions would count as waiting."""
        state = (self._num_seen, self._num_waiting())  # an abort changes it without any output
        if self._outputs or state != self._sent_state:
            self._sent_state, outputs, self._outputs = state, self._outputs, []
            self._link.send(Outputs(outputs, *state))

    def _go_on(self) -> None:
        """Do, between steps that an operator's work waits for, what cannot wait for that work."""
        self._send_outputs()
        self._inbox.do_urgent()

    def _num_waiting(self) -> dict[str, int]:
        """Sequences that are not admitted, by tenant."""
        waiting = Counter(self.engine.num_waiting)
        for message in self._compiling.values():
            waiting[message.options.tenant] += message.params.n
        return dict(waiting)

    def _run_inbox(self) -> bool:
        """Do the work in the inbox; wait for some while the engine is idle. False: the process is to end."""
        while True:
            try:
                work = self._inbox.get(block=not (self.engine.has_work or self._outputs))
            except queue.Empty:
                return True
            if work is None:
                return False
            work()
            if self._inbox.empty():
                return True

    def _prepare(self, message: ToEngine) -> Work:
        match message:
            case Submit() if message.params.structured_outputs is not None:
                return lambda: self._await_grammar(message)
            case Submit():
                work = self._prepare_request(message)
                return lambda: self._count(work)
            case Abort(id):
                return Urgent(lambda: self._abort(id))
            case Pause(id, mode, clear_cache):
                return lambda: self._answer(id, lambda: self._pause(mode, clear_cache=clear_cache))
            case Resume(id):
                return lambda: self._answer(id, self.engine.resume)
            case SetWeightVersion(id, version):
                return lambda: self._answer(id, lambda: self.engine.set_weight_version(version, self._go_on))
            case InitWeightTransfer(id, info):
                return lambda: self._answer(id, lambda: self.engine.init_weight_transfer(msgpack.decode(info)))
            case StartWeightUpdate(id):
                return lambda: self._answer(id, lambda: self.engine.start_weight_update(self._go_on))
            case UpdateWeights(id, info):
                return lambda: self._answer(id, lambda: self._update_weights(msgpack.decode(info)))
            case FinishWeightUpdate(id, name):
                return lambda: self._answer(id, lambda: self._finish_weight_update(name))
            case Profile(id, starts):
                return lambda: self._answer(id, self.engine.start_profile if starts else self.engine.stop_profile)
            case LoadAdapter():
                return self._prepare_adapter(message)
            case UnloadAdapter(id, name):
                return lambda: self._answer(id, lambda: self.engine.loras.unload(name))
            case Sleep(id, level, mode):
                return lambda: self._answer(id, lambda: self.engine.sleep(level, mode, self._go_on))
            case WakeUp(id, tags):
                return lambda: self._answer(id, lambda: self.engine.wake_up(tags))
            case ResetPrefixCache(id):
                return lambda: self._answer(id, lambda: self.engine.reset_prefix_cache(self._go_on))
        raise AssertionError(f"{message!r} is the first message and no other")

    def _count(self, work: Work) -> None:
        self._num_seen += 1
        work()

    def _await_grammar(self, message: Submit) -> None:
        self._num_seen += 1
        self._compiling[message.id] = message
        self._grammars.add(message)

    def _prepare_grammar(self, message: Submit) -> None:
        work = self._prepare_request(message)

        def go_on() -> None:
            if self._compiling.pop(message.id, None) is not None:  # else its client has left meanwhile
                work()

        self._inbox.put(go_on)

    def _abort(self, id: str) -> None:
        message = self._compiling.pop(id, None)
        if message is None:
            return self.engine.abort(id)
        self._grammars.drop(id)
        end = Finish("abort", 0, 0, 0.0)
        self._outputs += [Output(id, index, "", [], finish=end) for index in range(message.params.n)]

    def _pause(self, mode: str, *, clear_cache: bool) -> None:
        for id in list(self._compiling) if mode == "abort" else ():
            self._abort(id)
        self.engine.pause(mode, clear_cache=clear_cache, on_step=self._go_on)
        self._send_outputs()  # ahead of the answer

    def _update_weights(self, info: dict[str, Any]) -> None:
        """Update weights. While the engine is paused, the pause has said what becomes of KV."""
        keep_cache = bool(info.get("keep_cache", self.engine.is_paused and not self.engine.is_updating))
        self.engine.update_weights(info, keep_cache=keep_cache, on_step=self._go_on)

    def _finish_weight_update(self, version: str | None) -> None:
        self.engine.finish_weight_update(version, keep_cache=self.engine.is_paused)

    def _prepare_request(self, message: Submit) -> Work:
        def refuse(error: AtomError | None) -> None:
            self._link.send(Refused(message.id, "" if error is None else str(error)))

        def submit() -> None:
            try:
                self.engine.submit(sequences, self._queue_output)
            except RequestError as error:
                refuse(error)

        try:
            sequences: list[Sequence] = self.engine.prepare(
                message.prompt, message.params, message.options, request_id=message.id
            )
        except AtomError as error:
            reason = error
            return lambda: refuse(reason)
        except Exception:  # ends one request, not the engine
            LOG.exception("a request cannot be prepared")
            return lambda: refuse(None)
        return submit

    def _prepare_adapter(self, message: LoadAdapter) -> Work:
        """Read an adapter's files in this thread; the rest is done between two steps."""
        try:
            files = self.engine.loras.read(message.path)
        except Exception as error:
            reason = error
            return lambda: self._answer(message.id, lambda: _raise(reason))
        return lambda: self._answer(message.id, lambda: self.engine.loras.load(message.name, files))

    def _answer(self, id: str, work: Callable[[], Path | None]) -> None:
        """Do what an operator has asked for, and answer with the file that it has written, if any."""
        try:
            written = work()
        except (AtomError, OSError) as error:
            done = Done(id, "", str(error))
        except Exception:
            LOG.exception("what an operator asked for has failed")
            done = Done(id, "", "internal error, the engine's log has it", is_internal=True)
        else:
            done = Done(id, "" if written is None else str(written))
        done.is_sleeping, done.is_paused = self.engine.is_sleeping, self.engine.is_paused or self.engine.is_updating
        done.weight_version, done.weights_fault = self.engine.weight_version, self.engine.weights_fault
        self._link.send(done)

    def _queue_output(self, output: RequestOutput) -> None:
        """The engine's callback: queue the new output of one sequence for `_send_outputs`."""
        sequence = output.sequence
        finish = None
        if output.finished:
            finished_at = sequence.finished_at or sequence.arrival
            admitted_at = sequence.admitted_at or finished_at
            first_token_at = sequence.first_token_at or finished_at
            if sequence.params.prompt_logprobs is not None:
                self._send_prompt_logprobs(output, sequence.prompt_logprobs)
            finish = Finish(
                str(output.finish_reason),
                len(sequence.output) if sequence.pooling is None else 0,
                sequence.num_cached,
                admitted_at - sequence.arrival,
                sequence.stop_string,
                sequence.error,
                sequence.num_accepted,
                first_token_at - admitted_at,
                finished_at - first_token_at,
                sequence.num_preemptions,
                sequence.weight_versions if sequence.pooling is None else [],
            )
        made = Output(output.request_id, output.index, output.text, output.token_ids, output.logprobs or None, finish)
        if len(sequence.output) == len(output.token_ids):
            made.admitted = Admitted(sequence.num_cached, sequence.hit)
        if sequence.pooling is not None:  # the token after the prompt is not shown
            made.text, made.tokens = "", []
            made.embedding = None if sequence.embedding is None else sequence.embedding.tobytes()
        if output.finished and sequence.tapped:
            made.taps = {name: Tapped(states.shape, states.tobytes()) for name, states in sequence.taps.items()}
        self._outputs.append(made)
        if made.taps:  # so that no message has those of several answers
            self._send_outputs()

    def _send_prompt_logprobs(self, output: RequestOutput, scored: list[Logprobs | None]) -> None:
        """Send the log probabilities of a prompt in portions, so that the HTTP process serves others in between."""
        for start in range(0, len(scored), PORTION):
            part = scored[start : start + PORTION]
            portion = Output(output.request_id, output.index, "", [], prompt_logprobs=part)
            self._link.send(Outputs([portion], *self._sent_state))


def _raise(error: Exception) -> NoReturn:
    raise error


def import_engine() -> None:
    """Import what opens an engine."""
    with no_collection():
        import atom.assemble  # noqa: F401


def open_real(start: Start, progress: Progress) -> Engine:
    """Open the engine, which shares the cores with those of the other replicas, and draws tokens of its own."""
    config = start.config
    with no_collection():
        import torch

        from atom.assemble import open_engine

        if config.parallel.replicas > 1:
            torch.set_num_threads(max(torch.get_num_threads() // config.parallel.replicas, 1))
        clock = PhaseClock({"imports": seconds_since_exec()})
        return open_engine(config, progress, replica=start.replica, clock=clock, opens_grammars=True)


def run_worker(descriptor: int) -> int:
    """Run `main` in a process that was forked for it. descriptor: of the socket"""
    return main(prepare=import_engine, descriptor=descriptor)


def describe_gpus() -> str:
    """The GPUs that this process may use, as in `2 x NVIDIA H200`."""
    import torch

    names = Counter(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    return " + ".join(f"{count} x {name}" for name, count in names.items())


def main(make: Open = open_real, prepare: Callable[[], object] = lambda: None, descriptor: int | None = None) -> int:
    """Serve an engine on a socket; the exit code.

    prepare: called before the configuration is loaded
    descriptor: of the socket; None: the last argument
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[-1]) if descriptor is None else descriptor)
    connection.set_inheritable(False)
    link = Link(connection)
    worker, stopped = Worker(link), threading.Event()
    started: queue.SimpleQueue[Start] = queue.SimpleQueue()

    def receive() -> None:
        try:
            started.put(await_start(link))
        except Exception as error:
            LOG.exception("the configuration cannot be read")
            fail(link, error, 1)
            log.flush()
            end_group()
        beats = (link, worker.make_heartbeat, stopped)
        threading.Thread(target=send_heartbeats, args=beats, name="beat", daemon=True).start()
        worker.receive()

    threading.Thread(target=receive, name="receive", daemon=True).start()
    try:
        try:
            prepare()
        finally:
            start = started.get()  # a failure reported before the HTTP process has sent this would be lost
        state: dict[str, Any] = {"is_paused": start.is_paused, "weight_version": start.weight_version}
        worker.load(lambda: make(start, worker.progress), start.config.device, **state)
        worker.run()
        worker.close(start.config.serve.http.drain_seconds)
    except AtomError as error:
        return fail(link, error, error.exit_code)
    except OSError as error:
        return 0 if isinstance(error, BrokenPipeError | ConnectionResetError) else fail(link, error, 1)
    except Exception as error:
        LOG.exception("the engine has failed")
        return fail(link, error, 1)
    finally:
        stopped.set()
        end_children()
    return 0


def await_start(link: Link) -> Start:
    """Wait for the configuration; end this process if the HTTP process has left, or asks for it."""
    try:
        start, *later = link.receive()
    except (EOFError, OSError):
        os._exit(0)
    if later:  # before the engine is ready, the HTTP process sends nothing but this
        os._exit(0)
    assert isinstance(start, Start), "the configuration comes first"
    http = start.config.serve.http
    log.configure(http.log, http.log_level)
    os.environ |= environment_of(start.config, start.replica)  # which CUDA reads when it makes its first context
    if start.config.device == "cuda":
        open_early()
    return start


def environment_of(config: Config, replica: int) -> dict[str, str]:
    """The variables of a replica's process: of several with GPUs, each sees those of its ranks."""
    if config.device != "cuda" or config.parallel.replicas == 1:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices_of(config.parallel, replica))}


if __name__ == "__main__":
    sys.exit(main(prepare=import_engine))

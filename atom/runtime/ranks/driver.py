"""Send each step to all ranks, and collect what data groups sample.

    runner = Driver(runner, ranks, Mesh(tensor=2, data=2))
    pending = runner.execute(step)                  # of the first data group; step.others: of the others
    sampled = pending.wait()                        # of the first group; sampled.others: of the others

The first rank of each group returns what its group sampled; of further stages, what is tapped of their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from atom.checkpoint.lora import AdapterFiles
from atom.errors import EngineDeadError, RequestError
from atom.graph import Mesh
from atom.runtime.profiler import Profiler
from atom.runtime.ranks.links import Ranks
from atom.runtime.step.input import Capacity, StepInput
from atom.runtime.step.runner import Pending, Runner
from atom.runtime.types import BlockCopies, ChangeWeights, LoadAdapter, Profile, Sampled

WAIT = b""  # sent in place of a step: finish the oldest one
FAULT_SECONDS = 1.0  # to learn which rank has ended, after a collective has failed


class Driver:
    def __init__(self, runner: Runner, ranks: Ranks, mesh: Mesh) -> None:
        """runner: that of rank 0"""
        self.runner, self.run_ahead, self._ranks = runner, runner.run_ahead, ranks
        self._groups = [mesh.coordinates(rank)["data"] for rank in range(mesh.num_ranks)]
        self._reporters = mesh.reporters(has_taps=runner.model.num_taps > 0)[1:]
        self.num_groups = mesh.data
        self._dead: EngineDeadError | None = None  # why no further step can be started

    @property
    def capacity(self) -> Capacity:
        """The capacity of each group's runner."""
        return self.runner.capacity

    def execute(self, step: StepInput) -> RanksPending:
        """Start a step of each group. EngineDeadError, now and from then on, if it fails on any rank."""
        if self._dead is not None:
            raise self._dead
        with self.fatal():
            self._send_groups(step)
            return RanksPending(self.runner.execute(step), self, self._reporters)

    def finish_oldest(self) -> None:
        """Have the stages before the last one, which run ahead, finish the oldest step."""
        if self.runner.model.defers_logits:
            self._send_all(WAIT)

    def copy(self, copies: BlockCopies) -> None:
        """Start copies of blocks of each group. EngineDeadError, now and from then on, if it fails on any rank."""
        if self._dead is not None:
            raise self._dead
        with self.fatal():
            self._send_groups(copies)
            self.runner.copy(copies)

    def profile(self, *, starts: bool) -> None:
        """Have the other ranks start or stop their profilers between two steps."""
        self._send_all(msgspec.msgpack.encode(Profile(starts)))

    def load_adapter(self, number: int, files: AdapterFiles) -> None:
        """Have the other ranks load an adapter, and wait for them. RequestError names those that refuse, and why."""
        self._send_all(msgspec.msgpack.encode(LoadAdapter(number, files.path, files.digest)))
        if refused := self._ranks.wait():
            raise RequestError("; ".join(refused))

    def change_weights(self, message: ChangeWeights, own: Callable[[], None]) -> list[str]:
        """Have the other ranks take part in an update, while `own` does here; why some have failed."""
        self._send_all(msgspec.msgpack.encode(message))
        own()
        return self._ranks.wait()

    def check(self) -> None:
        """Raise why the ranks cannot go on, if they cannot."""
        self._ranks.check()

    def receive(self, rank: int) -> Sampled:
        """Receive what a rank reports of the oldest step not yet received."""
        return msgspec.msgpack.decode(self._ranks.receive(rank), type=Sampled)

    @contextmanager
    def fatal(self) -> Iterator[None]:
        """End all ranks if the body raises: a step that others have begun cannot be undone."""
        try:
            yield
        except BaseException as error:
            fault = self._ranks.await_fault(FAULT_SECONDS) if isinstance(error, Exception) else None
            why = str(fault or f"a step of several ranks failed: {type(error).__name__}: {error}")
            self._dead = EngineDeadError(why)
            self._ranks.fail(self._dead)
            if not isinstance(error, Exception):
                raise
            raise self._dead from error

    def _send_all(self, body: bytes) -> None:
        """Send all other ranks the same message."""
        self._ranks.send([body] * (len(self._groups) - 1))

    def _send_groups(self, message: StepInput | BlockCopies) -> None:
        """Send each other rank the message of its group, and leave only the first group's in `message`."""
        messages, message.others = [message, *message.others], []
        bodies = list(map(msgspec.msgpack.encode, messages))
        self._ranks.send([bodies[group] for group in self._groups[1:]])


class RanksProfiler(Profiler):
    """Traces all ranks, each to its own file; `stop` returns the first one's."""

    def __init__(self, driver: Driver, folder: str | None, *, is_detailed: bool) -> None:
        super().__init__(folder, is_detailed=is_detailed)
        self._driver = driver

    def start(self) -> None:
        super().start()
        self._driver.profile(starts=True)

    def stop(self) -> Path:
        if self.is_running:
            self._driver.profile(starts=False)  # first, so that all write at the same time
        return super().stop()


@dataclass
class RanksPending:
    """A started step of all groups."""

    own: Pending  # of the first group
    driver: Driver
    reporters: range  # the ranks that report besides

    def wait(self) -> Sampled:
        """Wait for all groups: what they sampled."""
        with self.driver.fatal():
            self.driver.finish_oldest()
            sampled = self.own.wait(self.driver.check)
            groups = [sampled, *map(self.driver.receive, self.reporters)]
        return merge_stages(groups, num_groups=self.driver.num_groups)


def merge_stages(reports: Sequence[Sampled], num_groups: int) -> Sampled:
    """What the first group sampled, and the others, with what is tapped of all stages. reports: by stage, and group"""
    groups, further = reports[:num_groups], reports[num_groups:]
    for number, report in enumerate(further):
        tapped = groups[number % num_groups].tapped
        for row, states in report.tapped.items():
            tapped.setdefault(row, {}).update(states)
    return replace(groups[0], others=[*groups[1:]])

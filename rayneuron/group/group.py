"""Several workers as one runner: what the engine calls `run` on when a model needs more than one rank.

Worker 0, rank 0 of stage 0, is this process. It packs every step once, tells all others (board.py), runs its own share, and collects.
Every wait has a deadline and names who is missing; the first loss breaks all waits, ends every worker, and is told once to `on_lost`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from rayneuron import settings, wire
from rayneuron.devices.base import StepOutput
from rayneuron.engine.runner import fills, pack
from rayneuron.engine.sequence import Plan
from rayneuron.errors import Busy, CheckpointError, ConfigError, RayNeuronError, WorkerLost
from rayneuron.group import arrays, assignment, messages, pipeline
from rayneuron.group.adopting import Adopting
from rayneuron.group.board import Behind, Board
from rayneuron.group.children import Children, Processes
from rayneuron.group.messages import Adopted, Advance, Done, Failed, Placed, Ready
from rayneuron.group.opening import Runnable
from rayneuron.group.rank import Rank
from rayneuron.group.rendezvous import Member, Rendezvous, allow_files
from rayneuron.group.swapping import Swapping
from rayneuron.group.watch import Watch, error_of
from rayneuron.group.worker import Invitation
from rayneuron.models import Progress
from rayneuron.placement.environment import BEFORE_START
from rayneuron.placement.layout import Layout, rank_threads
from rayneuron.placement.memory import float8
from rayneuron.processes import this_process
from rayneuron.transfer.agent import Agents, FarWorker

log = logging.getLogger(__name__)
Made = TypeVar("Made")

FILES_BESIDE_WORKERS, FILES_A_WORKER = 256, 8
_ENDING_S, _LOST_ENDING_S = 5.0, 1.0  # for workers to end by themselves; the latter after a loss


class Group:
    """Stands where `engine.runner.Runner` stands. Call `meet`, `load`, `warm`, each once, then `start`; `close` on failure too.

    `lost`: who was lost, None while all is well; `refused`: connections turned away; `step_s` and `busy_s`: all steps' and all ranks' time.
    """

    def __init__(
        self, model: Runnable, layout: Layout, *, processes: Processes | None = None, on_lost: Callable[[str], None] | None = None
    ) -> None:
        self.model, self.layout = model, layout
        self.config, self.capacity = model.config, model.capacity
        self.processes = processes or Children(BEFORE_START if self.config.instance else {})
        self.members: list[Member] = []
        self.refused = self.steps = 0
        self.step_s = self.busy_s = self._began_s = 0.0
        self.rank = Rank()
        self._watch: Watch | None = None
        self._agents: Agents | None = None
        self._board: Board | None = None
        self._on_lost, self._closed = on_lost, False

    @property
    def lost(self) -> str | None:
        """Who was lost first and how, None while the group is whole."""
        return self._watch.lost if self._watch is not None else None

    @property
    def idle_share(self) -> float:
        """The share of all steps' time in which a rank had nothing to do (the bubble), 1 - busy / (ranks x time); 0 in async mode."""
        return 1 - self.busy_s / (len(self.layout.workers) * self.step_s) if self.step_s and not self.overlaps else 0.0

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores this process holds in the node's ledger, for its whole share of the group."""
        return self.rank.grant.cores if self.rank.grant else ()

    def meet(self) -> None:
        """Start the workers' processes, wait for them, give each its place, connect them. Raises WorkerLost, ConfigError, Busy."""
        limits, ips, others = self.config.group, tuple(self.processes.node_ips), self.layout.workers[1:]
        files = FILES_BESIDE_WORKERS + FILES_A_WORKER * len(self.layout.workers)
        allow_files(files)
        rendezvous, longest, leader = Rendezvous(ips), assignment.longest_step(self.capacity), this_process()
        try:
            told = [(w.index, rendezvous.token, rendezvous.addresses(w.node), limits.start_s, None if w.node else leader) for w in others]
            self.processes.start([Invitation(*each, longest, files) for each in told], [worker.node for worker in others])
            self.members = rendezvous.gather(others, ips, limits.start_s, self.processes.gone)
        finally:
            self.refused = rendezvous.refused
            rendezvous.close()
        for member in self.members:
            member.channel.frames.limit_bytes = assignment.longest_answer(self.capacity, self.model.arch.vocab)
        self._watch = Watch(self.members, self._break, limits.silence_s)
        placed = self._take_places(rendezvous.token, ips)
        threads = rank_threads(self.config, self.layout, settings.threads())
        common = assignment.Common(self.capacity, self.model.dtype, threads, self.model.source, float8(self.config, self.model.raw))
        hellos = {0: this_process()} | {m.worker.index: (m.hello.pid, m.hello.started) for m in self.members}
        begins = assignment.begins(self.config, self.layout, placed, ips, hellos, common)
        self._board = Board.open([member for member in self.members if not member.worker.node], longest)
        for member, begin in zip(self.members, begins[1:], strict=True):
            self._tell(member, wire.frame(begin if self._board is None else replace(begin, spot=self._board.spot(member))))
        self._locally(lambda: self.rank.begin(begins[0], self._check))
        self._all(Ready, "has not connected to the others", limits.start_s)

    def load(self, progress: Progress = lambda done, total: None) -> None:
        """Read the weights, every rank its share, all at once."""
        self._together(messages.LoadWeights(), lambda: self.rank.load(self._checked(progress)), "has not loaded its weights")

    def warm(self, progress: Progress = lambda done, total: None) -> None:
        """Make every shape ready: first all have their graphs, however long one of them compiles; then they load them together."""
        self._together(messages.Prepare(), lambda: self.rank.prepare(self._checked(progress)), "has not compiled its graphs")
        self._together(messages.Warm(), lambda: self.rank.warm(self._checked(progress)), "has not warmed up")

    def _together(self, message: messages.ToWorker, work: Callable[[], None], late: str) -> None:
        self._send(message)
        self._locally(work)
        self._all(Ready, f"{late}, and made no progress", self.config.group.load_s)

    def exchange(self, said: messages.HandOver) -> list[FarWorker]:
        """The other workers' parts in handing KV over, each at the end of a channel beside that of its steps."""
        limit_s, node_ips = self.config.group.start_s, self.processes.node_ips
        far = any(member.worker.node for member in self.members)
        agents = self._agents = Agents(said.token, node_ips[0] if far else None, said.layout)
        self._send(*[replace(said, address=address) for address in agents.addresses])
        self._all(Ready, "has not begun to exchange KV", limit_s)
        return agents.all(len(self.members), limit_s)

    @property
    def shelf(self) -> Adopting | None:
        """The adapters of all ranks."""
        late, limit_s, shelf = "has not read an adapter", self.config.group.load_s, self.rank.shelf
        return None if shelf is None else Adopting(shelf, self.members, self._send, lambda: self._all(Adopted, late, limit_s))

    @property
    def swap(self) -> Swapping | None:
        """Other weights for all ranks."""
        late, limit_s, runner = "has not read other weights", self.config.group.load_s, self.rank.runner
        swap = None if runner is None else runner.swap
        return None if swap is None else Swapping(swap, self.members, self._send, lambda: self._all(Adopted, late, limit_s))

    @property
    def overlaps(self) -> bool:
        """Whether a step may begin while one runs."""
        return self.config.compile.async_mode

    def start(self, plan: Plan) -> pipeline.UnderWay:
        """Begin one step on all ranks; where the device cannot queue it, this process's share is done here.

        Raises WorkerLost, and nothing runs here any more; RowError before anything has been done.
        """
        self._check()
        self._began_s = time.perf_counter()
        divided = pipeline.divide(self.capacity, plan, self.layout.pipeline_parallel, self.config.micro_batches)
        parts = [*(before := fills(self.capacity, plan)), *((shape, pack(p.works, shape, self.capacity.space)) for shape, p in divided)]
        self.steps += 1
        self._send(messages.Step(self.steps, plan.copies, [arrays.part(shape, batch) for shape, batch in parts], plan.installs))
        begun = self._locally(lambda: self.rank.start(plan.copies, parts, plan.installs))
        return pipeline.UnderWay(self.steps, begun[len(before) :], [len(p.works) for _, p in divided], self._end)

    def _end(self, step: pipeline.UnderWay) -> StepOutput:
        outputs = self._locally(lambda: [part.wait() for part in step.parts])
        late, limit_s, board = f"has not finished step {step.number}", self.config.group.step_s, self._board
        busy = [] if board is None else self._on_board(lambda: board.collect(step.number, limit_s, self._check), late)
        answers = [self._answer(m, Done, late, limit_s) for m in self.members if board is None or board.wanting(m, self.layout)]
        self.step_s += time.perf_counter() - self._began_s
        self.busy_s += self.rank.busy_s + sum(busy) + sum(answer.busy_s for answer in answers)
        last = next(([arrays.step_output(sent) for sent in a.outputs] for a in answers if a.outputs), outputs)
        return pipeline.merge(last, step.rows)

    def close(self) -> None:
        """End every worker and give everything back. Harmless twice."""
        if self._closed:
            return
        self._closed, orderly = True, self.lost is None
        if self._agents is not None:
            self._agents.close()
        try:
            self._dismiss(orderly)
        finally:
            self.rank.close()

    def _dismiss(self, orderly: bool) -> None:
        """See the other workers off."""
        if self._watch is not None:
            self._watch.stop()
        if orderly and self._board is not None:
            with suppress(RayNeuronError, Behind):
                self._board.write(wire.frame(messages.Stop()), 1.0, lambda: None)
        for member in self.members:
            with suppress(wire.WireError, TimeoutError):  # it has ended already
                if not orderly:
                    member.channel.shutdown()
                elif self._board is None or member.worker.node:
                    member.channel.send(messages.Stop(), 1.0)
        self.processes.end(_ENDING_S if orderly else _LOST_ENDING_S)
        for member in self.members:
            member.channel.close()
        if self._board is not None:
            self._board.close()

    def _take_places(self, token: bytes, ips: Sequence[str]) -> list[Placed]:
        limits, places = self.config.group, assignment.places(self.config, self.layout, ips, token, str(settings.ledger_dir()))
        for member, place in zip(self.members, places[1:], strict=True):
            self._tell(member, wire.frame(place))
        mine = self._locally(lambda: self.rank.place(places[0]))
        return [mine, *self._all(Placed, "has not taken its place", limits.start_s + limits.cores_s)]

    def _send(self, message: messages.ToWorker, far: messages.ToWorker | None = None) -> None:
        """Tell all others; `far`: other words for those of other hosts."""
        frame, limit_s, board = wire.frame(message), self.config.group.step_s, self._board
        if board is not None:
            self._on_board(lambda: board.write(frame, limit_s, self._check), "has read nothing")
        for member in self.members:
            if board is None or member.worker.node:  # else it reads the board
                self._tell(member, wire.frame(far) if member.worker.node and far is not None else frame)

    def _on_board(self, work: Callable[[], Made], late: str) -> Made:
        try:
            return work()
        except Behind as slow:
            raise self._lose(f"{slow.member.name} {late} within {self.config.group.step_s:g} s") from None

    def _tell(self, member: Member, frame: bytearray) -> None:
        try:
            member.channel.send_frame(frame, self.config.group.step_s)
        except (wire.WireError, TimeoutError) as problem:
            raise self._lose(f"{member.name} is gone ({problem})", member) from None

    def _locally(self, work: Callable[[], Made]) -> Made:
        """This process's own share. What breaks because another one died is reported as that one's death."""
        try:
            return work()
        except BaseException as error:
            if self._watch is not None and isinstance(error, WorkerLost):
                self._watch.blame()
            if self.lost is not None and self._watch is not None:
                raise self._watch.why() from error
            if isinstance(error, WorkerLost):
                raise self._lose(f"worker 0 waited in vain: {error}") from error
            if not isinstance(error, ConfigError | CheckpointError | Busy):
                self._lose(f"worker 0 failed: {type(error).__name__}: {error}")
            raise

    def _all(self, kind: type[Made], late: str, timeout_s: float) -> list[Made]:
        """One answer of each worker, in order. Advance restarts the clock."""
        return [self._answer(member, kind, late, timeout_s) for member in self.members]

    def _answer(self, member: Member, kind: type[Made], late: str, timeout_s: float) -> Made:
        while True:
            try:
                answer = member.channel.receive(timeout_s, self._check)
            except TimeoutError:
                raise self._lose(f"{member.name} {late} within {timeout_s:g} s") from None
            except wire.WireError as problem:
                raise self._lose(f"{member.name} is gone ({problem})", member) from None
            if isinstance(answer, kind):
                return answer
            if isinstance(answer, Failed):
                failed = error_of(member, answer)
                if answer.kind == WorkerLost.__name__ and self._watch is not None:
                    self._watch.blame()
                lost = self._lose(failed.message)
                raise lost if isinstance(failed, WorkerLost) else failed
            if not isinstance(answer, Advance):
                raise self._lose(f"{member.name} answered {type(answer).__name__} where {kind.__name__} was due")

    def _checked(self, progress: Progress) -> Progress:
        def report(done: int, total: int) -> None:
            self._check()
            progress(done, total)

        return report

    def _check(self) -> None:
        if self._watch is not None and self._watch.lost is not None:
            raise self._watch.why()
        if self._closed:
            raise WorkerLost("the group is closed")

    def _lose(self, reason: str, *gone: Member) -> RayNeuronError:
        """Note a loss, unless there was one before; the error to raise names the first."""
        if self._watch is not None:
            self._watch.lose(reason, gone)
        return self._watch.why() if self._watch is not None and self._watch.lost is not None else WorkerLost(reason)

    def _break(self, reason: str) -> None:
        """On the first loss, from whatever thread saw it: end everybody's waiting."""
        log.error("the group is lost: %s", reason)
        self.rank.abort()
        if self._board is not None:
            self._board.abort()
        for member in self.members:
            member.channel.shutdown()
        if self._on_lost is not None:
            self._on_lost(reason)

"""In-memory checkpoints: when one is made, and in which of two staging buffers.

At the end of a step the state is copied into a staging buffer, and training continues; a thread
commits the copy with the other ranks (`memory_commit`). A worker that dies afterwards has lost
nothing: the staging buffer is in the agent's directory, and the next round loads it from there. If
in-memory checkpoints cannot work, that is logged once, and training continues with those on disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, MutableMapping
from functools import cache, partial
from pathlib import Path

from zero_checkpoint.consensus import StoreConsensus
from zero_checkpoint.errors import CheckpointError
from zero_checkpoint.files.place import Place
from zero_checkpoint.format.layout import FileLayout
from zero_checkpoint.format.pieces import State
from zero_checkpoint.loading.candidates import newest_committed
from zero_checkpoint.loading.in_memory import MemorySearch
from zero_checkpoint.memory.node import MemoryNode, home_of
from zero_checkpoint.memory.peers import ReplicaPeers
from zero_checkpoint.options import NodeMemory
from zero_checkpoint.saving.commit import Lineage
from zero_checkpoint.saving.copiers import BeforeChange
from zero_checkpoint.saving.memory_commit import MemoryOff, MemorySave, NotKept, commit_in_memory
from zero_checkpoint.saving.publish import Fence
from zero_checkpoint.saving.staging import Background, FrozenImage, OnPart, Outcome, StagingBuffer
from zero_checkpoint.saving.staging_memory import NoStagingMemory, SharedStaging, sweep
from zero_contract.errors import CommitRefused
from zero_contract.signing import Key
from zero_contract.worker import PeerMemoryReply

_log = logging.getLogger(__name__)

STAGINGS = 2
"""One holds the newest committed checkpoint while the other is filled."""
REMIND_S = 600.0
"""A problem of in-memory checkpoints is logged again after this long."""
_KEPT, _POORER, _REFUSED, _OFF = "kept", "poorer", "refused", "off"


class InMemoryCheckpoints:
    """One rank's checkpoints in memory."""

    def __init__(
        self,
        config: NodeMemory,
        consensus: StoreConsensus,
        lineage: Lineage,
        reply: PeerMemoryReply,
        needs: MutableMapping[object, int],
        before_change: BeforeChange | None = None,
        on_end: Callable[[Outcome], None] = lambda outcome: None,
        place: int = 0,
    ) -> None:
        """Nothing is kept yet.

        Args:
            config: Interval, number of copies and budget.
            consensus: The votes of these checkpoints alone; its `on_wait` raises when the group is
                lost.
            lineage: Shared by all savers of this run.
            reply: The node's memory, as its agent grants it; or why there is none: then no
                in-memory checkpoints are made.
            needs: Bytes of it that each engine of this process needs; shared by all of them.
            before_change: See `StagingBuffer`.
            on_end: Called between steps with each save that has ended.
            place: Of this engine among those of the process, see `home_of`.
        """
        self._problem = reply.reason
        self.place = place
        self._on_end = on_end
        self._node: MemoryNode | None = None
        self._stagings: list[StagingBuffer] = []
        if reply.directory:
            self._node = MemoryNode(
                directory=Path(reply.directory),
                address=reply.address,
                key=Key(reply.key),
                budget_bytes=reply.budget_bytes,
            )
            job, where = os.environ.get("TORCHELASTIC_RUN_ID", "alone"), self._node.directory
            # The buffers of dead workers would leave no room for those of this one.
            sweep(where)
            self._stagings = [
                StagingBuffer(
                    SharedStaging(job, consensus.rank, where),
                    before_change=before_change,
                    on_wait=consensus.on_wait,
                )
                for _ in range(STAGINGS)
            ]
        self._config = config
        self._rank = consensus.rank
        self._lineage = lineage
        self._needs = needs
        self._consensus = consensus
        self._background = Background()
        self._peers = ReplicaPeers(Key(reply.key))
        self._search: MemorySearch | None = None
        self._root: Place | None = None
        self._newest: Callable[[], tuple[int, int] | None] = lambda: None
        self._needed_bytes = 0
        self._off = False
        self.begun_step = 0
        """The newest step whose save has begun, or that was loaded."""
        self.kept_step: int | None = None
        """The newest step in memory, as far as this worker knows."""
        self._logged, self._logged_s = "", 0.0

    # ---- loading ----

    def search(self) -> MemorySearch:
        """Search this node's memory, for a load by all ranks; call `prepare` first."""
        self._search = MemorySearch(self._node, self.place)
        return self._search

    def prepare(self) -> None:
        """Before a load: wait until nothing is being copied or committed."""
        self._take_outcome()
        for staging in self._stagings:
            staging.settle()  # a save may have failed before its copy ended

    def forget(self) -> None:
        """Drop the references to the tensors of the last saves; the staging buffers stay."""
        for staging in self._stagings:
            staging.forget()

    def loaded(self, root: Place, chosen: str | None, step: int) -> None:
        """Continue from the checkpoint that a load has chosen; free all others.

        `chosen` is None if it was on disk; `step` is 0 without one.
        """
        self._settle(root)
        self.begun_step = step
        self.kept_step = step if chosen is not None else None
        # A load that has not searched here has chosen nothing of what is here.
        search, self._search = self._search or MemorySearch(self._node, self.place), None
        search.forget_others(root, chosen)

    def _settle(self, root: Place) -> None:
        """From now on, keep checkpoints of the run whose checkpoints on disk are in `root`."""
        self._root = root
        # Looked up once: what this run commits from now on, the lineage counts.
        self._newest = cache(partial(newest_committed, root))

    # ---- saving ----

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._background.busy

    def due(self, step: int, *, some_rank_busy: bool) -> bool:
        """Whether to save after this step; equal on all ranks."""
        # Training never waits for a save in flight: steps have no checkpoint until it is done.
        if self._off or some_rank_busy:
            return False
        self._take_outcome()  # no rank was busy, so every rank knows how the last save has ended
        return not self._off and step - self.begun_step >= self._config.every_steps

    def begin(
        self,
        root: Place,
        state: State,
        lay_out: Callable[[State], FileLayout],
        fence: Callable[[int, str], Fence | None],
        problem: CheckpointError | None = None,
    ) -> None:
        """Copy the state, and begin to commit it; then the tensors may change, see `snapshot`.

        The `meta` of the state must not change any more. `lay_out` may raise CheckpointError;
        `fence` goes from step and tag to that of `commit.save`; with a `problem` there are no more
        checkpoints.
        """
        if root != self._root:
            self._settle(root)
        step = self.begun_step = int(state.meta["engine"]["step"])
        tag = f"global_step{step}"
        image = self._snapshot(state, lay_out) if problem is None else None
        self._problem = str(problem) if problem is not None else self._problem
        save = MemorySave(
            root=root,
            place=self.place,
            state=state,
            image=image,
            problem=self._problem,
            step=step,
            tag=tag,
            round=self._lineage.round,
            fence=fence(step, tag),
            newest=self._newest,
            replicas=self._config.replicas,
        )
        self._background.start(step, partial(self._commit, save))

    def give_up(self, reason: str) -> None:
        """Make no more checkpoints in memory; every rank calls it at the same step."""
        if not self._off:
            self._off = True
            self._report(_OFF, f"no checkpoints in memory, only on disk: {reason}")

    def disown(self, reason: str) -> None:
        """Make no more checkpoints in memory, and free those that were made: they lack state."""
        self._take_outcome()
        self.give_up(reason)
        if self._root is not None:
            MemorySearch(self._node, self.place).forget_others(self._root, None)

    def close(self) -> None:
        """Finish the save in flight, soon; committed checkpoints stay with the agent."""
        if self.busy:
            self._peers.set_deadline()  # a copy given up for it is reported as missing
        self._take_outcome()
        for staging in self._stagings:
            staging.close()

    def _snapshot(self, state: State, lay_out: Callable[[State], FileLayout]) -> FrozenImage | None:
        """A copy of this rank's share; None if there can be none: then `_problem` says why."""
        if self._node is None:
            return None
        try:
            layout = lay_out(state)
            workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            # On a single node there is no peer that could keep a copy.
            replicas = self._config.replicas if self._consensus.world > workers else 0
            self._needs[self] = needed_bytes(layout.size_bytes, workers, replicas)
            # The engines of a process share the node's memory.
            self._needed_bytes = sum(self._needs.values())
            self._problem = over_budget(self._needed_bytes, self._node.budget_bytes)
            return None if self._problem else self._stagings[0].snapshot(layout)
        except (NoStagingMemory, CheckpointError) as error:
            self._problem = str(error)
            return None

    def _commit(self, save: MemorySave, on_part: OnPart) -> Path:
        """On the thread of the saves."""
        kept = commit_in_memory(save, self._consensus, self._node, self._peers, on_part)
        assert self._node is not None
        self._lineage.advance_to(kept.name)
        if self._rank == 0:
            _log.debug("step %d is in memory", save.step)
            text = (
                f"checkpoints are kept in memory, with {self._needed_bytes / (1 << 20):.1f} MiB of "
                f"each node, {self._node.budget_bytes >> 20} MiB at most"
            )
            if kept.poorer:
                self._report(_POORER, f"{text}; without some copies: {'; '.join(kept.poorer)}")
            else:
                self._report(_KEPT, text, level=logging.INFO)
        return self._node.directory_of(home_of(save.root, save.place), kept.name)

    def _take_outcome(self) -> None:
        """Wait for the save in flight, and act on how it has ended."""
        outcome = self._background.wait()
        if outcome is None:
            return
        self._on_end(outcome)
        match outcome.error:
            case None:
                self.kept_step = outcome.step
                # The buffer of the newest committed checkpoint is not written to.
                self._stagings.reverse()
            case CommitRefused() | NotKept() as error:
                kept = "and nothing else is"
                if self.kept_step is not None:
                    kept = f"step {self.kept_step} still is"
                self._report(_REFUSED, f"step {outcome.step} is not in memory, {kept}: {error}")
            case MemoryOff() as error:
                self.give_up(str(error))
            case error:
                # It is unknown whether it was committed, so neither staging buffer may be written
                # to.
                self._off = True
                self._report(_OFF, f"no more checkpoints in memory in this round: {error}")

    def _report(self, news: str, text: str, level: int = logging.WARNING) -> None:
        """Log news when they have changed, and a problem again every `REMIND_S`."""
        now_s = time.monotonic()
        is_due = level >= logging.WARNING and now_s - self._logged_s >= REMIND_S
        if news == self._logged and not is_due:
            return
        if self._rank == 0:
            _log.log(level, "%s", text)
        self._logged, self._logged_s = news, now_s


def needed_bytes(image_bytes: int, workers: int, replicas: int) -> int:
    """The bytes of a node's memory that in-memory checkpoints need."""
    # Images of other nodes are assumed to be as large as one of its own workers'.
    return STAGINGS * image_bytes * workers * (1 + replicas)


def over_budget(needed: int, budget: int) -> str:
    """Why `needed` bytes exceed a node's budget, or ""."""
    if needed <= budget:
        return ""
    return (
        f"they need {needed / (1 << 20):.1f} MiB of each node, the budget is "
        f"{budget / (1 << 20):.1f} MiB; raise checkpoint.ram.budget_bytes or the agents' "
        "--ram-budget, enlarge /dev/shm, or lower checkpoint.ram.replicas"
    )

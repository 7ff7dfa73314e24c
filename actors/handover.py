"""One resize, as the driver runs it: prepare in the shadow, plan, connect, pause, move, certify, commit.

In the safe mode nothing here changes the old generation before the commit: whatever fails until then, the new
generation is dropped and the old one goes on with its next step. Where memory is too short for that, the move is that
of `tight.py`. The same steps serve a death: then the survivors are frozen where they
are instead of pausing at an agreed step, and the new ranks map their memory.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from typing import Any

from ray_etc.actors import quiesce
from ray_etc.actors.certificate import compare
from ray_etc.actors.errors import HoldsMore, ResizeFailed, StateLost
from ray_etc.actors.generation import Generation, TrainJob, Wait
from ray_etc.actors.headroom import Headroom
from ray_etc.actors.messages import Boundary
from ray_etc.actors.outcomes import not_built
from ray_etc.actors.record import ResizeRecord
from ray_etc.actors.tight import TightMove, peak_of_slots
from ray_etc.planners.errors import StateMissing
from ray_etc.planners.facts import facts_of
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.parallel import sources_of_streams
from ray_etc.planners.phases import PhasedPlan
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.words import size


def start_generation(generation: Generation, job: TrainJob, wait: Wait, is_emptied: bool = False) -> None:
    """Bring every rank of a new generation to where its train loop stands before its first step, its memory emptied
    for a tight handover or not.

    Raises:
        ResizeFailed: a rank's train loop ended before that; the message ends with the user's own error.
    """
    timeout_s = job.start_timeout_s
    wait(generation.becoming, timeout_s, f"the processes of generation {generation.number} to start")
    [store] = wait([generation.ranks[0].open_store.remote(timeout_s)], timeout_s, "rank 0 to open a store")
    generation.start_loops(store, job, is_emptied)
    entering = [rank.wait_entered.remote(timeout_s, is_emptied) for rank in generation.ranks]
    entered = wait(entering, timeout_s, f"generation {generation.number} to build its model")
    if None in entered:
        rank = entered.index(None)
        [outcome] = wait([generation.outcome_refs[rank]], job.timeout_s, f"rank {rank} to say why it ended")
        generation.outcomes[rank] = outcome
        raise not_built(rank, generation.parallel, outcome)
    generation.entered = entered


class Handover:
    """The move of all state from an old generation to a new one that stands before its first step."""

    def __init__(
        self,
        old: Generation,
        new: Generation,
        usable: Collection[int],
        job: TrainJob,
        wait: Wait,
        record: ResizeRecord,
        headroom: Headroom | None = None,
    ) -> None:
        self._headroom = headroom
        self._tight: TightMove | None = None
        self._releases_early = self._has_released = False
        self._old, self._new, self._job, self._wait, self._record = old, new, job, wait, record
        self._usable = usable
        self._timeout_s = job.timeout_s
        self._group = f"{job.name}-{new.number}-{uuid.uuid4().hex[:8]}"
        self._members: list[Any] = []

    def carry_out(self) -> None:
        """Everything up to and with the commit. On any exception call `abort`.

        Raises:
            StateLost: the old generation has lost ranks, or released its state, and the new one did not come to begin.
        """
        if self._old.dead:
            with self._record.phase("quiesce"):
                boundaries = quiesce.freeze(self._old, self._wait, self._timeout_s)
            plan = self._prepare_move(sources=list(boundaries))
        else:
            plan = self._prepare_move(sources=list(range(len(self._old.ranks))))
            with self._record.phase("quiesce"):
                boundaries = quiesce.pause(self._old, self._wait, self._timeout_s)
        self._record.next_step = next(iter(boundaries.values())).next_step
        self._record.paused_at = max(boundary.ended_at for boundary in boundaries.values())
        if self._tight is not None:
            self._tight.carry_out()
        else:
            self._move_and_certify(plan, boundaries)
        try:
            self._load_and_commit(boundaries)
        except Exception as error:
            if self.is_past_return:
                raise StateLost(
                    f"the new generation has the whole state but did not begin: {type(error).__name__}: {error}; the "
                    "old one has released it: start again from a checkpoint"
                ) from error
            raise

    @property
    def is_past_return(self) -> bool:
        """Whether the old generation has released any of its state, and so cannot go on."""
        return self._has_released or (self._tight is not None and self._tight.is_past_return)

    def abort(self) -> None:
        """Drop the new generation; the old one goes on with the step after the one it paused at, if it still can."""
        self._new.kill()
        if self.is_past_return:
            return
        for rank in self._old.survivors():
            self._old.ranks[rank].end_migration.remote(self._group, True)
            if not self._old.dead:  # without its peers a rank could not finish another step
                self._old.ranks[rank].resume.remote()

    def _prepare_move(self, sources: list[int]) -> MigrationPlan:
        with self._record.phase("plan"):
            plan = self._plan(sources)
            phased = self._choose_mode(plan)
            if not self._old.dead:  # else there is no going on without it, however long it takes
                self._require_time([phase.plan for phase in phased.phases] if phased else [plan])
        with self._record.phase("connect"):
            self._connect(plan)
            if phased is None:
                self._hand_out(plan, sources)
            else:
                warming = [member.warm_up.remote() for member in self._members]
                self._wait(warming, self._job.start_timeout_s, "kernels to be compiled")
                self._tight = TightMove(
                    *(plan, phased, self._old, self._new, self._members, self._group),
                    *(self._wait, self._timeout_s, self._record, self._job.links.direct_nbytes),
                )
        return plan

    def _choose_mode(self, plan: MigrationPlan) -> PhasedPlan | None:
        """The plan in phases where the old state must go before the new one is there.

        Raises:
            HoldsMore: this was not expected, so the new ranks were built with their memory.
            DoesNotFit: the new ranks hold so much more than was expected that there is no room in either mode.
        """
        if self._headroom is None:
            return None
        entered = {slot.slot_id: each for slot, each in zip(self._new.slots, self._new.entered, strict=True)}
        choice = self._headroom.choose(
            plan,
            {slot_id: each.allocations for slot_id, each in entered.items()},
            {slot_id: each.room for slot_id, each in entered.items() if each.room is not None},
        )
        was_expected_tight, self._record.memory_mode = self._record.memory_mode == "tight", choice.mode
        self._record.nbytes_peak_predicted, self._releases_early = choice.nbytes_peak, choice.releases_early
        if choice.phased is not None:
            self._record.nbytes_wire, self._record.nbytes_local = choice.phased.nbytes_wire, choice.phased.nbytes_local
        if choice.phased is not None and not was_expected_tight:
            raise HoldsMore(
                "the new ranks hold more than was expected, or leave less room, too little for the whole old state; "
                f"phase by phase a slot holds {size(choice.nbytes_peak)} at most"
            )
        if choice.phased is None and was_expected_tight:
            filled = self._wait([r.fill.remote() for r in self._new.ranks], self._timeout_s, "memory for the state")
            self._new.share(filled)
        return choice.phased

    def _plan(self, sources: list[int]) -> MigrationPlan:
        held = self._old.layouts()
        source = {self._old.slots[rank].slot_id: held[self._old.slots[rank].slot_id] for rank in sources}
        target = self._new.layouts()
        nodes = {slot.slot_id: slot.node_name for slot in [*self._old.slots, *self._new.slots]}
        try:
            # What only slots that will go hold leaves them first, whatever time there is.
            leaving = [slot for slot in source if slot not in self._usable]
            plan = make_plan(source, target, nodes, usable=self._usable, endangered=leaving, links=self._job.links)
        except StateMissing as missing:
            if not self._old.dead:
                raise
            lost = ", ".join(str(rank) for rank in sorted(self._old.dead))
            raise StateLost(f"rank {lost} died, and the survivors do not hold the whole state: {missing}") from missing
        plan.check()
        self._record.plan = plan
        self._record.nbytes_wire, self._record.nbytes_local = plan.nbytes_wire, plan.nbytes_local
        self._record.nbytes_lower_bound = plan.nbytes_lower_bound
        self._record.move_s_predicted = facts_of(plan, self._job.links).seconds.total
        return plan

    def _require_time(self, moves: Sequence[MigrationPlan]) -> None:
        """Raise ResizeFailed where training would stand still until the deadline in vain."""
        seconds = max(facts_of(move, self._job.links).seconds.total for move in moves)
        if seconds > self._timeout_s:
            raise ResizeFailed(
                f"to move {size(self._record.nbytes_wire + self._record.nbytes_local)} takes {seconds:.0f} s at the "
                f"speeds of `links`, more than timeout_s={self._timeout_s:g}; raise timeout_s, or calibrate the links "
                "where they are faster"
            )

    def _release_old(self) -> None:
        """Make room for the first step of the new generation, which has everything."""
        ending = [member.end_migration.remote(self._group, False) for member in self._members]
        self._wait(ending, self._timeout_s, "the new generation to let go of the old one's memory")
        self._has_released = True
        releasing = [rank.release.remote() for rank in self._old.ranks]
        self._wait(releasing, self._timeout_s, "the old generation to release its memory")

    def _connect(self, plan: MigrationPlan) -> None:
        """One process a slot: the new rank where there is one, the old one in a slot that is leaving."""
        for slot_id in plan.slots:
            generation = self._new if slot_id in self._new.slot_ids else self._old
            self._members.append(generation.actor_in(slot_id))
        backend = "ETC_NCCL" if self._job.resources.get("GPU") else "ETC_GLOO"
        size = len(self._members)
        opening = [m.open_migration.remote(backend, self._group, rank, size) for rank, m in enumerate(self._members)]
        rendezvous, *_ = self._wait(opening, self._timeout_s, "the migration group to open")
        connecting = [m.connect_migration.remote(self._group, rendezvous, self._timeout_s) for m in self._members]
        self._wait(connecting, self._timeout_s, "the migration group to connect")

    def _hand_out(self, plan: MigrationPlan, sources: list[int]) -> None:
        """Give each member its own part of the plan, and the memory of the old rank in its slot."""
        shared = {self._old.slots[rank].slot_id: self._old.entered[rank].shared for rank in sources}
        preparing = []
        for rank, (member, slot_id) in enumerate(zip(self._members, plan.slots, strict=True)):
            is_new = slot_id in self._new.slot_ids
            memory = shared.get(slot_id) if is_new else None
            part, direct_nbytes = plan.for_rank(rank), self._job.links.direct_nbytes
            preparing.append(
                member.prepare_move.remote(self._group, part, plan.source[rank], memory, is_new, direct_nbytes)
            )
        self._wait(preparing, self._timeout_s, "the move to be prepared")

    def _move_and_certify(self, plan: MigrationPlan, boundaries: dict[int, Boundary]) -> None:
        with self._record.phase("move"):
            moved = self._wait(
                [m.move.remote(self._group, self._timeout_s) for m in self._members],
                self._timeout_s,
                "the state to move",
            )
        reports = [each.move for each in moved]
        for part in ("local", "wire", "certify"):
            self._record.phases[part] = max(getattr(report, f"{part}_s") for report in reports)
        with self._record.phase("certify"):
            compare(plan, reports)
        if not self._old.dead:  # who is frozen in a step holds its activations, too
            held = {self._old.slots[rank].slot_id: each.nbytes_allocated for rank, each in boundaries.items()}
            self._record.nbytes_peak = int(peak_of_slots(plan, self._new.slot_ids, moved, held).max())

    def _load_and_commit(self, boundaries: dict[int, Boundary]) -> None:
        next_step = next(iter(boundaries.values())).next_step
        with self._record.phase("commit"):
            held = {
                self._old.parallel.coordinate(r): boundary.small_state.streams for r, boundary in boundaries.items()
            }
            loading = []
            for rank, member in enumerate(self._new.ranks):
                wanted = self._new.parallel.coordinate(rank)
                replicated = next(iter(boundaries.values())).small_state.replicated
                streams = {at: held[at] for at in sources_of_streams(held, wanted)}
                loading.append(member.load.remote(next_step, replicated, streams, self._timeout_s))
            self._wait(loading, self._timeout_s, "the small state to be loaded")
            self._record.certified = True
            if self._releases_early and self._tight is None:
                self._release_old()
            beginning = [member.begin.remote(next_step) for member in self._new.ranks]
            self._wait(beginning, self._timeout_s, "the new generation to begin")
        for member in self._members:
            member.end_migration.remote(self._group, False)

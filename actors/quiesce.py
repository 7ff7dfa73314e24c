"""How a generation comes to stand still between two steps: by agreement, or, after a death, frozen where it is."""

from __future__ import annotations

from collections.abc import Mapping

from ray_etc.actors.errors import ResizeFailed, StateLost
from ray_etc.actors.generation import Generation, Wait
from ray_etc.actors.messages import Boundary

FIRST_LEAD_STEPS = 2
LONGEST_LEAD_STEPS = 64


def pause(generation: Generation, wait: Wait, timeout_s: float) -> dict[int, Boundary]:
    """Agree on a last step that no rank has passed, a little ahead, and wait for its end.

    Where that step made no update, gradients may wait for a later one, which are not moved: then it is the next that
    does.

    Returns:
        The boundary of each rank, all of the same step.
    """
    lead = FIRST_LEAD_STEPS
    while True:
        next_steps = wait([rank.next_step.remote() for rank in generation.ranks], timeout_s, "the ranks' progress")
        last_step = max(next_steps) + lead - 1
        agreed = wait([rank.propose_last_step.remote(last_step) for rank in generation.ranks], timeout_s, "agreement")
        if all(agreed):
            break
        # Whoever reached the proposed step meanwhile goes on; next time the step is named further ahead.
        wait([rank.resume.remote() for rank in generation.ranks], timeout_s, "the ranks to go on")
        lead *= 2
        if lead > LONGEST_LEAD_STEPS:
            raise ResizeFailed(
                f"no step within {LONGEST_LEAD_STEPS} of step {max(next_steps)} can be the last: the run is ending"
            )
    for step in range(last_step, last_step + LONGEST_LEAD_STEPS):
        if step > last_step:
            proposed = [rank.propose_last_step.remote(step) for rank in generation.ranks]
            if not all(wait(proposed, timeout_s, "agreement")):
                break
        boundaries = wait(
            [rank.wait_paused.remote(timeout_s) for rank in generation.ranks], timeout_s, f"step {step} to end"
        )
        if all(boundary.is_whole for boundary in boundaries):
            paused = dict(enumerate(boundaries))
            _check_replicated(paused)
            return paused
    raise ResizeFailed(
        f"step {last_step} and those after it made no update of the weights, and gradients that wait for a later one "
        "are not moved: end each step of ray_etc.steps() with an update"
    )


def freeze(generation: Generation, wait: Wait, timeout_s: float) -> dict[int, Boundary]:
    """Stop the survivors of a death before their next optimizer update.

    Returns:
        The boundary of each survivor that holds the newest whole step; the others are of no use.

    Raises:
        StateLost: every survivor is half-way through an update.
    """
    boundaries: dict[int, Boundary] = {}
    reasons = []
    frozen = {rank: generation.ranks[rank].freeze.remote(timeout_s) for rank in generation.survivors()}
    for rank, ref in frozen.items():
        try:
            [boundaries[rank]] = wait([ref], timeout_s, f"rank {rank} to freeze")
        except TimeoutError as error:
            reasons.append(str(error))
    if not boundaries:
        raise StateLost(f"no survivor stands between two steps: {'; '.join(reasons) or 'every rank died'}")
    newest = max(boundary.next_step for boundary in boundaries.values())
    whole = {rank: boundary for rank, boundary in boundaries.items() if boundary.next_step == newest}
    _check_replicated(whole)
    return whole


def _check_replicated(boundaries: Mapping[int, Boundary]) -> None:
    """Replicated state is taken from one rank, so it must be equal on all."""
    first_rank, first = next(iter(boundaries.items()))
    for rank, boundary in boundaries.items():
        for name, digest in boundary.digests.items():
            if digest != first.digests[name]:
                raise ResizeFailed(
                    f"{name!r} is registered as replicated, but ranks {first_rank} and {rank} differ at step "
                    f"{boundary.next_step}: register it under `streams`, by coordinate"
                )

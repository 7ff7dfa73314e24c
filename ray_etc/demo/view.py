"""The demo's one live view: where the training stands, and what each resize did."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

PHASES = {
    "prepare": "prepare in the shadow",
    "quiesce": "quiesce",
    "local": "local bytes",
    "wire": "wire bytes",
    "certify": "certify",
    "first_step": "first step",
}
BARS = " ▁▂▃▄▅▆▇█"


class View:
    """A context; `show` draws the run as it stands."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=8, vertical_overflow="visible")
        self._start = time.monotonic()
        self._events: list[str] = []
        self._last: Group | None = None
        self._unbroken = ""

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def say(self, event: str) -> None:
        line = f"{time.monotonic() - self._start:6.1f} s  {event}"
        self._events.append(line)
        if not self._console.is_terminal:
            self._console.print(line)

    def show(self, run: Any) -> None:
        status = run.status()
        metrics = status.metrics or {}
        line = Text()
        line.append(f"step {status.step + 1}/{self._steps}", style="bold")
        line.append(
            f"   loss {metrics.get('loss', float('nan')):.4f}   {metrics.get('tokens_per_s', 0.0):,.0f} tokens/s   "
        )
        line.append(str(status.parallel or ""), style="bold cyan")
        line.append(f"   generation {status.generation if status.generation is not None else '-'}")
        curve, activity = Text(_curve(losses_of(run.reports)), style="green"), Text(status.activity, style="dim")
        self._last = Group(line, curve, activity, _resizes(run.resizes))
        self._draw()

    def show_unbroken(self, run: Any) -> None:
        self._unbroken = f"never resized: step {run.status().step + 1}/{self._steps}"
        self._draw()

    def conclude(self, summary: dict[str, Any], problems: list[str], tolerance: float) -> None:
        self._unbroken = ""
        difference = summary["loss_max_abs_difference"]
        self.say(f"largest difference in loss from the run without resizes: {difference:.1e} (allowed {tolerance:.0e})")
        self.say(f"every sample once and in order: {'yes' if summary['samples_in_order'] else 'NO'}")
        for problem in problems:
            self.say(f"FAILED: {problem}")
        if not problems:
            self.say("every byte that moved was certified before it was used")
        self._draw()

    def _draw(self) -> None:
        if self._last is None:
            return
        events = Text("\n".join(self._events[-8:]))
        self._live.update(Panel(Group(self._last, events, Text(self._unbroken)), title="ray_etc"))


def losses_of(reports: dict[int, dict[int, list[dict[str, Any]]]]) -> list[float]:
    """The loss of each step, which is the same on every rank."""
    return [next(iter(by_rank.values()))[0]["loss"] for _, by_rank in sorted(reports.items()) if by_rank]


def _curve(losses: list[float]) -> str:
    """The loss so far as one line of bars."""
    if len(losses) < 2:
        return ""
    width = 72
    if len(losses) > width:
        losses = [losses[i * (len(losses) - 1) // (width - 1)] for i in range(width)]
    low, high = min(losses), max(losses)
    return "".join(BARS[1 + int((loss - low) / ((high - low) or 1.0) * (len(BARS) - 2))] for loss in losses)


def _resizes(records: list[Any]) -> Text:
    """Three lines a resize: what changed and the pause, the phases, the bytes."""
    text = Text()
    for record in records:
        text.append(f"resize {record.generation}  {record.parallel_from} → {record.parallel_to}", style="cyan")
        text.append(f"  {record.reason}")
        if record.error:
            text.append(f"\n  given up: {record.error.splitlines()[0]}\n", style="red")
            continue
        if record.pause_s is not None:
            text.append(f"  pause {_duration(record.pause_s)}", style="bold")
        phases = [f"{title} {_duration(record.phases[key])}" for key, title in PHASES.items() if key in record.phases]
        text.append(f"\n  {', '.join(phases)}\n", style="dim")
        if record.plan is not None:
            text.append(
                f"  {record.nbytes_wire / 1e6:.2f} MB over the wire (least possible "
                f"{record.nbytes_lower_bound / 1e6:.2f} MB), {record.nbytes_local / 1e6:.2f} MB stayed in their slots"
                f"{', certified' if record.certified else ''}\n"
            )
    return text


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"

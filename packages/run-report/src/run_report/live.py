"""One live console line of a run: step, reward, validation, time left. A bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any

from .render import duration


class LiveLine:
    """Shows where a run stands.

    Args:
        total_steps: the step at which the run ends.
        first_step: the step already done when the line starts (a resumed run's), so that the pace is not overestimated.
        stream: where to write; standard output by default.
        plain: force plain lines (True) or the bar (False); by default the bar is used on a terminal.
        plain_interval_s: plain lines come at most this often; the first and the last step always get one.

    Use as a context manager: `with LiveLine(120) as live: live.update(1, {"reward": 0.57})`.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        stream: IO[str] | None = None,
        plain: bool | None = None,
        plain_interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.stream = stream or sys.stdout
        self.plain = not self.stream.isatty() if plain is None else plain
        self._first_step = first_step
        self._interval = plain_interval_s
        self._clock = clock
        self._start = clock()
        self._last_line: float | None = None
        self._values: dict[str, float] = {}
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> LiveLine:
        self._start = self._clock()
        if not self.plain:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

            self._progress = Progress(
                SpinnerColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.description}", markup=False),
                console=Console(file=self.stream),
            )
            self._progress.start()
            self._task = self._progress.add_task("starting", total=self.total_steps, completed=self._first_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Step `step` is done. `values` are shown in order; those not given again keep their last number."""
        self._values.update(values)
        line = self.line(step)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=line)
            return
        now = self._clock()
        if self._last_line is None or step >= self.total_steps or now - self._last_line >= self._interval:
            self._last_line = now
            print(line, file=self.stream, flush=True)

    def note(self, text: str) -> None:
        """A line that stays, above the live one."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.stream, flush=True)

    def line(self, step: int) -> str:
        """The text of the line at `step`."""
        width = len(str(self.total_steps))
        parts = [f"step {step:>{width}}/{self.total_steps}"]
        parts += [f"{name} {value:.3f}" for name, value in self._values.items()]
        done = step - self._first_step
        if done > 0:
            pace = (self._clock() - self._start) / done
            parts.append(f"{pace:.1f} s/step")
            parts.append(f"eta {duration(pace * (self.total_steps - step))}")
        return "  ".join(parts)

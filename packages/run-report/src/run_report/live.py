"""One live console line of a run: step, reward, validation, time left. A bar on a terminal, plain lines in a log.

`working` is for what comes before: it says what takes long, and how long it has taken.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
        self._values: dict[str, float | str] = {}
        self._said = ""
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

    def busy(self, phase: str) -> None:
        """What is being done now: on a terminal it stands after the line."""
        if self._progress is not None:
            self._progress.update(self._task, description=f"{self._said}  {phase} …".lstrip())

    def update(self, step: int, values: Mapping[str, float | str]) -> None:
        """Step `step` is done. `values` are shown in order, a number with three digits and a text as it is; those not given again
        stay as they were."""
        self._values.update(values)
        line = self._said = self.line(step)
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
        shown = {name: value if isinstance(value, str) else f"{value:.3f}" for name, value in self._values.items()}
        parts += [f"{name} {value}" for name, value in shown.items()]
        done = step - self._first_step
        if done > 0:
            pace = (self._clock() - self._start) / done
            parts.append(f"{pace:.1f} s/step")
            parts.append(f"eta {duration(pace * (self.total_steps - step))}")
        return "  ".join(parts)


@contextmanager
def working(text: str, say: Callable[[str], object] = print, every_s: float = 20.0) -> Iterator[None]:
    """Say that something begins, every `every_s` seconds that it still goes on, and, if that was ever said, that it is done."""
    start, ended, told = time.monotonic(), threading.Event(), [False]

    def remind() -> None:
        while not ended.wait(every_s):
            told[0] = True
            say(f"{text}: {duration(time.monotonic() - start)} so far")

    say(f"{text} …")
    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if told[0]:
        say(f"{text}: done in {duration(time.monotonic() - start)}")

"""Ends what is left of a local Ray, and removes its folder, once the program that started it is gone, however that ended.

Ray's own agents look for their head for a minute after a kill -9, and its logs stay. `cluster.ray_session` runs this file as a
script of its own, without any package: its standard input ends with the program.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "RAY_TRAINER_SESSION"
"""Environment variable that every process of a local Ray has: the session's folder."""


def left_over(folder: str) -> list[int]:
    """Processes of the session that are still there, this one and the program left out. Linux only; none is seen elsewhere."""
    mark, found = f"{MARK}={folder}\0".encode(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit() or int(name) in (os.getpid(), os.getppid()):
            continue
        try:
            here = Path("/proc", name)
            # Ray's agents have written their title over their environment; they are known by the logs that they hold open.
            agent = (here / "cmdline").read_bytes().startswith(b"ray::")
            opened = [os.readlink(one) for one in (here / "fd").iterdir()] if agent else []
            if mark in (here / "environ").read_bytes() or any(one.startswith(folder) for one in opened):
                found.append(int(name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def main(folder: str) -> None:
    sys.stdin.buffer.read()
    end = time.monotonic() + 10
    while (pids := left_over(folder)) and time.monotonic() < end:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])

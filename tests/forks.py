"""Ray's worker processes as forks of one that has imported what they need: 8 s of a processor once, not in every process.

Ray starts this file where it would start its own `setup_worker.py`. So started it asks the one that waits, and ends. That one is
started as `warm_worker.py wait MODULE…`: what it imports beside what a model's process does.
"""

import argparse
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time

PLACE = os.path.join(
    os.environ["RAY_TRAINER_SESSION"], "warm"
)  # every process of the Ray has it, see ray_trainer.keeper


def ask() -> None:
    """Have a worker started with this process's arguments, environment, folder and outputs."""
    with socket.socket(socket.AF_UNIX) as line:
        while line.connect_ex(PLACE):
            time.sleep(0.02)
        asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(line, [len(asked).to_bytes(8, "big")], [1, 2])
        line.sendall(asked)
        line.recv(1)  # it has been forked


def wait(modules: list[str]) -> list[str]:
    """Import, and fork a worker for each that asks, until standard input ends. Returns in a worker: its arguments.

    Ray is not imported, for it reads its environment as it is loaded.
    """
    import peft  # noqa: F401
    from diffusers import QwenImagePipeline, QwenImageTransformer2DModel  # noqa: F401
    from ray_trainer import workers  # noqa: F401

    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # no worker looks through all of it for garbage
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none that has ended stays
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(PLACE)
        door.listen(64)
        while True:
            if sys.stdin in select.select([door, sys.stdin], [], [])[0]:
                sys.exit()
            line, _ = door.accept()
            with line, line.makefile("rb") as words:
                size, outputs, _, _ = socket.recv_fds(line, 8, 2)
                arguments, environment, folder = json.loads(words.read(int.from_bytes(size, "big")))
                if not os.fork():
                    break
            for one in outputs:
                os.close(one)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for one, place in zip(outputs, (1, 2), strict=True):
        os.dup2(one, place)
        os.close(one)
    return arguments


def work(arguments: list[str]) -> None:
    """What Ray's own two files do in a new process."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    found, sys.argv = parser.parse_known_args(arguments)
    update_envs(RuntimeEnvContext.deserialize(found.serialized_runtime_env_context).env_vars)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        work(wait(sys.argv[2:]))
    else:
        ask()

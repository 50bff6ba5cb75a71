"""Processes as forks of one that has imported what they need: 8 s of a processor once, not in each of them.

The suite's first process starts `forks.py serve PLACE`, which waits at that socket and imports when it is asked first. Who asks
sends arguments, environment, folder and standard files, and gets a process that does with them what a new Python would. Ray asks
through this file too: it starts it where it would start its own `setup_worker.py`.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time

FORKS = "FORKS"
"""Environment variable: where the process waits that is asked."""


class Forked:
    """Such a process, as far as tests need the face of a `Popen`.

    Args:
        place: where to ask.
        arguments: a file, or a folder with a `__main__.py`, and what it gets.
        stdin: the process's standard input; none without it.
        stdout: where its output goes; kept for `communicate` without it, as its errors are.
    """

    def __init__(self, place, arguments, env=None, cwd=None, stdin=None, stdout=None):
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self.returncode = None
        with open(os.devnull) as nothing:
            files = [one.fileno() for one in (stdin or nothing, stdout or self._out, self._err)]
            self._line = ask(place, list(map(str, arguments)), dict(env or os.environ), str(cwd or os.getcwd()), files)
        self.pid = received(self._line)

    def poll(self, timeout=0.0):
        """Its exit code; None while it runs."""
        if self.returncode is None and select.select([self._line], [], [], timeout)[0]:
            self.returncode = received(self._line)
        return self.returncode

    def wait(self, timeout=None):
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """What it has written, once it has ended."""
        self.wait(timeout)
        return tuple(os.pread(one.fileno(), 1 << 26, 0).decode() for one in (self._out, self._err))

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def ask(place, arguments, environment, folder, files):
    """Ask for a process; the line on which come its number, and its exit code."""
    line, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + 60
    while code := line.connect_ex(place):
        if time.monotonic() > deadline:
            raise OSError(code, os.strerror(code), place)
        time.sleep(0.02)
    asked = json.dumps([arguments, environment, folder]).encode()
    socket.send_fds(line, [len(asked).to_bytes(8, "big")], files)
    line.sendall(asked)
    return line


def number(value):
    return value.to_bytes(8, "big", signed=True)


def received(line):
    """The next number. A process that is asked and dies sends none, which is no exit code of 0."""
    if len(found := line.recv(8, socket.MSG_WAITALL)) < 8:
        raise ConnectionError("the process that others are forked from is gone")
    return int.from_bytes(found, "big", signed=True)


def import_all(modules):
    """What a driver, a model's process, and those that these modules are for have in common.

    Not Ray, which reads its environment as it is loaded.
    """
    gc.disable()  # looking for garbage, of which there is none, takes a fifth of the time
    import dpo_online.trainer  # noqa: F401
    import flowgrpo.trainer  # noqa: F401
    import peft  # noqa: F401
    from diffusers import QwenImagePipeline, QwenImageTransformer2DModel  # noqa: F401
    from ray_trainer import workers  # noqa: F401

    for module in modules:
        importlib.import_module(module)
    assert "ray" not in sys.modules
    gc.freeze()  # no fork looks through all of it for garbage
    gc.enable()


def serve(place, modules, life, last=False):
    """Fork for each that asks, until the file `life` ends; with `last` what still runs then is killed.

    Returns in a fork: what it was asked to be.
    """
    running, imported = {}, False
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(place)
        door.listen(64)
        while True:
            ready = select.select([door, life, woken], [], [])[0]
            if life in ready:
                for one in running if last else ():
                    os.kill(one, signal.SIGKILL)
                os._exit(0)
            if woken in ready:
                os.read(woken, 64)
                while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    with running.pop(ended[0]) as line, contextlib.suppress(OSError):
                        line.sendall(number(os.waitstatus_to_exitcode(ended[1])))
            if door not in ready:
                continue
            if not imported:
                import_all(modules)
                imported = True
            line, _ = door.accept()
            with line.makefile("rb") as words:
                size, files, _, _ = socket.recv_fds(line, 8, 3)
                asked = json.loads(words.read(int.from_bytes(size, "big")))
            if pid := os.fork():
                running[pid] = line
                with contextlib.suppress(OSError):
                    line.sendall(number(pid))
                for one in files:
                    os.close(one)
                continue
            break
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for one in (line, *running.values()):
        one.close()
    for one in (woken, wake):
        os.close(one)
    return (*asked, files)


def become(arguments, environment, folder, files):
    """What a new Python does with these."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for one, place in zip(files, (0, 1, 2), strict=True):
        os.dup2(one, place)
        os.close(one)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # two processes draw other numbers, unless they set a seed
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def fork_workers():
    """Have a Ray that this process starts later fork its workers from a copy of this process as it is now."""
    from ray_trainer.cluster import prepare_environment

    life, held = os.pipe()  # which ends with this process
    place = f"{os.environ[FORKS]}.{os.getpid()}"
    if not os.fork():
        os.close(held)
        become(*serve(place, (), life))
        sys.exit()
    os.close(life)
    os.environ[FORKS] = place
    prepare_environment()
    let_ray_ask()


def let_ray_ask():
    """Have a Ray that this process starts later ask for its workers. It starts none of its own programs that no run asks for
    anything: what scales clusters, what reads logs, and the dashboard's server."""
    from ray._private import node, parameter

    changes = {"setup_worker_path": __file__, "no_monitor": True, "include_log_monitor": False}

    class Forking(parameter.RayParams):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options | changes)

    parameter.RayParams = Forking
    node.Node.start_api_server = lambda self, **_: setattr(self, "_webui_url", None)


def work(arguments):
    """What Ray's own two files do in a new process, which has a group of its own: Ray may kill that."""
    os.setpgrp()
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    found, sys.argv = parser.parse_known_args(arguments)
    update_envs(RuntimeEnvContext.deserialize(found.serialized_runtime_env_context).env_vars)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    if what == "serve":
        place, *modules = given
        become(*serve(place, modules, sys.stdin, last=True))
    elif what == "work":
        work(given)
    elif what == "program":  # an app, or `one_ray.py`
        fork_workers()
        module, sys.argv = given[0] == "-m", given[given[0] == "-m" :]
        (runpy.run_module if module else runpy.run_path)(sys.argv[0], run_name="__main__")
    elif what == "python":  # a program, where a shell would start it
        line = ask(os.environ[FORKS], [__file__, "program", *given], dict(os.environ), os.getcwd(), (0, 1, 2))
        received(line)
        sys.exit(received(line))
    elif what == "ray":  # its command line
        let_ray_ask()
        sys.argv = sys.argv[1:]
        runpy.run_module("ray.scripts.scripts", run_name="__main__")
    else:  # Ray, for a worker
        arguments = [__file__, "work", *sys.argv[1:]]
        ask(os.environ[FORKS], arguments, dict(os.environ), os.getcwd(), (0, 1, 2)).recv(8)  # it has been forked

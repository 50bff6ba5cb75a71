"""Puts the fault that the environment variable FAULT describes into every process that starts with this folder on its path.

Python imports a module of this name by itself. `harness.Fault` writes the variable; see there for what it may say.
"""

import functools
import json
import os
import sys
import time


def _act(fault, result):
    """What happens at the chosen call; returns what the call gives back."""
    kind = fault["action"]
    if kind == "kill":
        os.kill(os.getpid(), 9)
    if kind == "hold":  # the harness now does what it likes to any process
        end = time.monotonic() + fault["seconds"]
        while time.monotonic() < end and not os.path.exists(fault["once"] + ".go"):
            time.sleep(0.05)
    if kind == "full":
        raise OSError(28, "No space left on device", fault["point"])
    if kind == "memory":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if kind == "nan":
        return _spoiled(result)
    return result


def _spoiled(value):
    """The same with a NaN in the first tensor of numbers."""
    import torch

    if isinstance(value, torch.Tensor):
        return value * float("nan")
    if isinstance(value, tuple):
        return (_spoiled(value[0]), *value[1:])
    raise TypeError(f"a fault cannot spoil a {type(value).__name__}")


def _rank():
    torch = sys.modules.get("torch.distributed")
    return torch.get_rank() if torch is not None and torch.is_initialized() else 0


def _arm(module, fault):
    place = module
    *inner, name = fault["point"].partition(":")[2].split(".")
    for part in inner:
        place = getattr(place, part)
    original, calls = getattr(place, name), [0]

    @functools.wraps(original)  # Ray calls an actor's method by its name
    def wrapped(*arguments, **keywords):
        calls[0] += 1
        due = calls[0] == fault["call"] and fault["rank"] in (None, _rank())
        if due:
            try:  # once in all processes together, so that what is restarted lives
                os.close(os.open(fault["once"], os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                due = False
        if due and fault["action"] == "nan_in":
            arguments = (arguments[0], _spoiled(arguments[1]), *arguments[2:])
        elif due and fault["action"] != "nan":
            _act(fault, None)
        result = original(*arguments, **keywords)
        return _act(fault, result) if due and fault["action"] == "nan" else result

    setattr(place, name, wrapped)


class _Finder:
    """Arms the module that the fault names when it is imported."""

    def __init__(self, fault):
        self.fault = fault

    def find_spec(self, name, path=None, target=None):
        if name != self.fault["point"].partition(":")[0]:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _arm(module, self.fault)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("FAULT"):
    fault = json.loads(os.environ["FAULT"])
    if module := sys.modules.get(fault["point"].partition(":")[0]):  # of a process that was forked
        _arm(module, fault)
    else:
        sys.meta_path.insert(0, _Finder(fault))

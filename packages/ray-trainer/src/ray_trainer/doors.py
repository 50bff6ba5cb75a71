"""What a person brings in a file of their own: named in the config by "module:attribute" or "./file.py:attribute".

A file becomes a module that this process and the workers import by name: its folder is searched last, after everything that is
installed (`PYTHONPATH` would put it first, and a `json.py` in it would break Ray). So a package that offers such a door needs to
know "module:attribute" and entry points alone, which Python loads itself.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from .errors import TrainerError
from .values import expand

FOLDERS = "RAY_TRAINER_FOLDERS"
"""Environment variable with the folders of a person's own files, for the processes that Ray starts."""


def search_folders() -> None:
    """Let this process import what `importable` named in the driver; Ray calls it in every process that it starts."""
    sys.path += [one for one in os.environ.get(FOLDERS, "").split(os.pathsep) if one and one not in sys.path]


def importable(key: str, name: str) -> str:
    """`name` in a form that every process can import: "./file.py:attribute" becomes "file:attribute".

    Raises:
        TrainerError: there is no such file, its name is no module's, or another module has that name.
    """
    place, colon, attribute = expand(name).rpartition(":")
    if not (colon and place.endswith(".py")):
        return name
    file = Path(place).resolve()
    if not file.is_file():
        raise TrainerError(f"{key}={name!r}: there is no file {file}")
    if not file.stem.isidentifier():
        raise TrainerError(f"{key}={name!r}: {file.stem!r} is no name for a Python module; rename the file")
    folder, module = str(file.parent), file.stem
    known = os.environ.get(FOLDERS, "")
    if folder not in known.split(os.pathsep):
        os.environ[FOLDERS] = f"{known}{os.pathsep}{folder}".lstrip(os.pathsep)
    search_folders()
    found = find_spec(module)
    if found is None or found.origin is None or Path(found.origin).resolve() != file:
        where = None if found is None else found.origin
        raise TrainerError(f"{key}={name!r}: {module!r} is the name of another module ({where}); rename the file")
    return f"{module}:{attribute}"

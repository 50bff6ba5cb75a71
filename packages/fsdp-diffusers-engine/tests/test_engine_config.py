"""The schema: imports without torch, works as OmegaConf structured configs, and holds no field that nothing reads."""

from __future__ import annotations

import ast
import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsdp_diffusers_engine
import pytest
from fsdp_diffusers_engine import config as schema
from fsdp_diffusers_engine import errors

SOURCE = Path(fsdp_diffusers_engine.__file__).parent
CLASSES = [getattr(schema, n) for n in dir(schema) if n.endswith(("Config", "Options")) and n != "DiffusionLossConfig"]


def test_config_needs_no_torch() -> None:
    code = (
        "import sys, fsdp_diffusers_engine as f, fsdp_diffusers_engine.config as c\n"
        "c.FSDPDiffusionActorConfig()\n"
        "assert not {'torch', 'diffusers', 'ray'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_needs_neither_gpu_nor_ray(forked: Any, tmp_path: Path) -> None:
    file = tmp_path / "imports.py"
    file.write_text(
        "import sys, fsdp_diffusers_engine as f\n"
        "f.TrainingWorker, f.ForwardProcess, f.remote_workers\n"
        "assert 'torch' in sys.modules and 'ray' not in sys.modules\n"
        "try:\n f.NoSuchName\nexcept AttributeError as e:\n assert 'NoSuchName' in str(e)\nelse:\n raise SystemExit('no error')"
    )
    done = forked([file], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.wait(60) == 0, done.communicate()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_field_has_words_under_it(cls: type) -> None:
    tree = ast.parse((SOURCE / "config.py").read_text())
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__).body
    for field, below in zip(body[1:], [*body[2:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            assert documented, f"{cls.__name__}.{ast.unparse(field.target)} has no docstring"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_field_is_read_somewhere(cls: type) -> None:
    read = set()
    for file in SOURCE.glob("*.py"):
        if file.name != "config.py":
            tree = ast.parse(file.read_text())
            read |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            # loops over field names, as in `getattr(config, name)`
            read |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    unread = [f.name for f in dataclasses.fields(cls) if f.name not in read]
    assert not unread


def test_omegaconf_takes_the_schema_and_refuses_typos() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    tree = omegaconf.OmegaConf.structured(schema.TrainingWorkerConfig)
    merged = omegaconf.OmegaConf.merge(
        tree, {"actor": {"model_config": {"path": "x", "target_modules": ["to_q"]}, "optim": {"lr": 3e-4}}}
    )
    built = omegaconf.OmegaConf.to_object(merged)
    assert isinstance(built, schema.TrainingWorkerConfig)
    assert built.actor.optim.lr == 3e-4
    assert built.actor.model_config.target_modules == ["to_q"]
    with pytest.raises(omegaconf.errors.ConfigKeyError):
        omegaconf.OmegaConf.merge(tree, {"actor": {"optim": {"learning_rate": 1.0}}})


@pytest.mark.parametrize(
    "error", [errors.EngineError, errors.EngineStateError, errors.CheckpointError, errors.RankError]
)
def test_errors_are_value_errors_and_survive_pickling(error: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(error("what, why, remedy")))
    assert type(again) is error
    assert str(again) == "what, why, remedy"
    assert isinstance(again, ValueError)

"""The import rules hold, and the checker can tell when they do not."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("check_layers", ROOT / "tools" / "check_layers.py")
check_layers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_layers)


def test_every_import_keeps_to_its_layer():
    assert check_layers.problems(ROOT) == []


def test_a_forbidden_arrow_is_found(tmp_path):
    package = tmp_path / "packages" / "sde-samplers" / "src" / "sde_samplers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "bad.py").write_text("import torch\nfrom lora_sync import verify\nimport diffusers\n")
    (package / "fine.py").write_text("def f():\n    import diffusers\n    return diffusers\n")
    found = check_layers.problems(tmp_path, {})
    assert len(found) == 2
    assert "bad.py:2: sde_samplers imports lora_sync; it may import none of its siblings" in found[0]
    assert "bad.py:3: sde_samplers imports diffusers while being imported" in found[1]


def test_a_new_package_must_say_what_it_may_import(tmp_path):
    package = tmp_path / "packages" / "new-thing" / "src" / "new_thing"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import torch\n")
    assert "not in MAY_IMPORT" in check_layers.problems(tmp_path, {})[0]


RINGS = {
    "at the top": ("from sde_samplers.b import x\n", "import sde_samplers.a\n"),
    "relative, in a function": ("from .b import x\n", "def f():\n    from . import a\n    return a\n"),
    "for types alone": (
        "from . import b\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import y\n",
    ),
    "through the package": ("from . import b\n", "from sde_samplers import a\n"),
}


@pytest.mark.parametrize("kind", RINGS)
def test_a_ring_inside_a_package_is_found(tmp_path, kind):
    package = tmp_path / "packages" / "sde-samplers" / "src" / "sde_samplers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for name, text in zip("ab", RINGS[kind], strict=True):
        (package / f"{name}.py").write_text(text)
    (line,) = check_layers.problems(tmp_path, {})
    assert "a ring of imports, sde_samplers." in line
    assert check_layers.problems(tmp_path, {"sde_samplers": {"a", "b"}}) == []
    (package / "b.py").write_text("")
    assert check_layers.problems(tmp_path, {}) == []
    (line,) = check_layers.problems(tmp_path, {"sde_samplers": {"a", "b"}})
    assert "a, b are no ring any more; take them out of KNOWN_RINGS" in line

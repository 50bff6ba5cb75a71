"""The import rules hold, and the checker can tell when they do not."""

import ast
import importlib.util
import re
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


SOURCES = sorted(
    file for place in ("packages/*/src", "apps/*", "examples", "tools") for file in ROOT.glob(f"{place}/**/*.py")
)


def parts_of(text, *kinds):
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def other_dialect(text):
    """Lines of a file's docstrings that are not Google style: roles, double ticks, arguments listed without `Args:`."""
    found = []
    for node in parts_of(text, ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
        doc = ast.get_docstring(node) or ""
        given = getattr(node, "args", None)
        names = {one.arg for one in [*given.args, *given.kwonlyargs]} if given else set()
        headed = re.search(r"^Args:$", doc, re.M)
        for line in doc.splitlines():
            marked = re.search(r"(?<!`)``(?!`)|:(class|func|meth|mod|param|returns?):|^(Errors|Parameters):", line)
            listed = re.match(r"(\w+)(, \w+)*(:| {2,})", line)
            if marked or (listed and listed[1] in names and not headed):
                found.append(line)
    return found


def test_docstrings_have_one_dialect():
    assert {str(f): bad for f in SOURCES if (bad := other_dialect(f.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "line", ["a: one number", "a   one number", "See :func:`f`.", "The ``a``.", "Errors: `X` for it."]
)
def test_another_dialect_is_found(line):
    assert other_dialect(f'def f(a):\n    """Short.\n\n    {line}\n    """\n') == [line]
    assert other_dialect('def f(a):\n    """Short.\n\n    Args:\n        a: one number.\n    """\n') == []


def test_ray_is_imported_in_one_way():
    """A package that can do without Ray has one `import_ray`; the loop cannot, and imports it where it is used."""
    homes = []
    for file in SOURCES:
        place, package = file.relative_to(ROOT).parts[:2]
        text = file.read_text(encoding="utf-8")
        if place == "packages" and package != "ray-trainer" and "ray" in text:
            for function in parts_of(text, ast.FunctionDef, ast.AsyncFunctionDef):
                names = [a.name for node in ast.walk(function) if isinstance(node, ast.Import) for a in node.names]
                homes += [(package, function.name)] * ("ray" in names)
    assert homes == [(name, "import_ray") for name in ("fsdp-diffusers-engine", "image-rewards", "omni-rollout")]


# CONTRIBUTING says why: the main command's numbers hang on them, or they follow a published rule.
OWN_SEEDS = {"windows.py", "prompts.py", "batch.py", "adapters.py", "tiny.py"}


def test_seeds_are_derived_in_one_place():
    found, draw = [], (".manual_seed", "random.Random", "default_rng")
    for file in SOURCES:
        text = file.read_text(encoding="utf-8")
        if file.relative_to(ROOT).parts[0] in ("packages", "apps") and any(name in text for name in draw):
            for call in parts_of(text, ast.Call):
                draws = ast.unparse(call.func).endswith(draw)
                if draws and not ast.unparse(call.args[0]).startswith("seed_of("):
                    found.append(file.name)
    assert sorted(found) == sorted(OWN_SEEDS)

"""The import rules hold, and the checker can tell when they do not."""

import importlib.util
from pathlib import Path

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
    found = check_layers.problems(tmp_path)
    assert len(found) == 2
    assert "bad.py:2: sde_samplers imports lora_sync; it may import none of its siblings" in found[0]
    assert "bad.py:3: sde_samplers imports diffusers while being imported" in found[1]


def test_a_new_package_must_say_what_it_may_import(tmp_path):
    package = tmp_path / "packages" / "new-thing" / "src" / "new_thing"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import torch\n")
    assert "not in MAY_IMPORT" in check_layers.problems(tmp_path)[0]

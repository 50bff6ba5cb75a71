"""Each package installs alone in an empty environment, and its README's example runs there.

Three forms: `pip install ./packages/<leaf>`, `uv pip install ./packages/<name>`, and `pip install --find-links dist <name>` after
`uv build --all-packages`. PyTorch is linked into each environment from uv's cache first, so that pip finds it satisfied instead of
fetching three gigabytes again. Nightly, each leaf on every Python that is promised.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UV = shutil.which("uv")
TORCH = ["torch==2.13.0"]
LEAVES = ["sde-samplers", "image-rewards"]
LEAVES_AT_NIGHT = ["diffusion-losses", "lora-sync", "run-report"]
PYTHONS = ["3.11", "3.12", "3.13"]
MORE = {"sde-samplers": ["./packages/model-specs", "diffusers==0.40.0", "transformers==5.14.1", "accelerate==1.12.0"]}
"""What a README's later examples have beside the leaf: a pipeline of one's own."""
NO_TORCH = {"image-rewards", "run-report"}
CONSTRAINTS = [f"{name}=={version}" for name, version in (("diffusers", "0.40.0"), ("transformers", "5.14.1"))]

pytestmark = pytest.mark.skipif(UV is None, reason="needs uv, which the README's command installs")


def command(*arguments, cwd, timeout=280):
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        [str(a) for a in arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout


def empty_environment(folder, *packages, version=sys.executable):
    command(UV, "venv", "--seed", "--python", version, folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    if packages:
        command(UV, "pip", "install", "--python", python, *packages, cwd=ROOT)
        lend_bytecode(Path(sysconfig.get_path("purelib")), next(folder.glob("venv/lib/*/site-packages")))
    return python


def lend_bytecode(ours, theirs):
    """Link what Python has compiled of the same packages here; it looks whether it is of the same files."""
    for folder, inside, _ in os.walk(theirs):
        compiled = ours / Path(folder).relative_to(theirs) / "__pycache__"
        if compiled.is_dir() and "__pycache__" not in inside:
            shutil.copytree(compiled, Path(folder, "__pycache__"), copy_function=os.symlink)


def examples(name):
    text = (ROOT / "packages" / name / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command(UV, "build", "--all-packages", "--wheel", "--out-dir", folder, cwd=ROOT)
    return folder


@pytest.mark.parametrize("name", [*LEAVES, *(pytest.param(n, marks=pytest.mark.nightly) for n in LEAVES_AT_NIGHT)])
def test_a_leaf_installs_with_pip_and_its_example_runs(name, tmp_path):
    python = empty_environment(tmp_path, *([] if name in NO_TORCH else TORCH))
    command(python, "-m", "pip", "install", "--quiet", ROOT / "packages" / name, cwd=tmp_path)
    command(python, "-c", examples(name)[0], cwd=tmp_path)


@pytest.mark.nightly  # with every change, the wheels of all packages
def test_a_package_with_siblings_installs_with_uv_and_its_example_runs(tmp_path):
    python = empty_environment(tmp_path, *TORCH, *CONSTRAINTS)
    command(UV, "pip", "install", "--python", python, ROOT / "packages" / "fsdp-diffusers-engine", cwd=ROOT)
    command(python, "-c", examples("fsdp-diffusers-engine")[0], cwd=tmp_path)


def test_wheels_install_from_a_folder_and_the_app_finds_its_assets(dist, tmp_path):
    names = {wheel.name.split("-")[0] for wheel in dist.glob("*.whl")}
    assert {
        n.replace("-", "_")
        for n in (*LEAVES, *LEAVES_AT_NIGHT, "model-specs", "fsdp-diffusers-engine", "omni-rollout", "ray-trainer")
    } < names
    packages = [
        *TORCH,
        *CONSTRAINTS,
        "ray==2.60.0",
        "pyyaml",
        "tensordict",
        "peft",
        "accelerate",
        "rich",
        "xxhash",
        "pillow",
    ]
    python = empty_environment(tmp_path, *packages)
    command(python, "-m", "pip", "install", "--quiet", "--find-links", dist, "flowgrpo", cwd=tmp_path)
    out = command(tmp_path / "venv" / "bin" / "flowgrpo", "--dry-run", cwd=tmp_path)
    assert "builtin:tiny_qwen_image" in out
    # One process, which imports torch and diffusers once; each example starts with empty hands.
    firsts = (examples(name)[0] for name in ("model-specs", "omni-rollout", "ray-trainer"))
    script = "".join(f"exec({code!r}, {{'__name__': '__main__'}})\n" for code in firsts)
    command(python, "-c", script, cwd=tmp_path)


def test_the_pythons_are_the_promised_ones():
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    assert promised == ">=3.11,<3.14"


@pytest.mark.nightly
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("leaf", [*LEAVES, *LEAVES_AT_NIGHT])
def test_a_leaf_alone_on_each_python_runs_its_readme(leaf, python, tmp_path):
    own = empty_environment(tmp_path, version=python)
    assert command(own, "-c", "import sys; print('%d.%d' % sys.version_info[:2])", cwd=tmp_path).strip() == python
    command(UV, "pip", "install", "--python", own, ROOT / "packages" / leaf, cwd=ROOT)
    first, *others = examples(leaf)
    command(own, "-c", first, cwd=tmp_path)
    if leaf in MORE:
        command(UV, "pip", "install", "--python", own, *MORE[leaf], cwd=ROOT)
    for code in others:
        command(own, "-c", code, cwd=tmp_path)

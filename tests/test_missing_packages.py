"""A message about a package that is not installed names the line to type, and that line names an extra that exists."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from image_rewards.errors import missing_extra

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(file for place in ("packages/*/src", "apps/*/src") for file in ROOT.glob(f"{place}/**/*.py"))
LINE = re.compile(
    r"(?:uv run --extra (\S+) (?:apps/\S+ )?…, or )?(?:uv )?pip install '\./packages/([\w-]+)\[([\w-]+)\]'"
)


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


ROOT_PROJECT = project(ROOT)
IN_ROOT = {
    (re.split(r"[\[\]]", entry)[0], part): extra
    for extra, entries in ROOT_PROJECT["optional-dependencies"].items()
    for entry in entries
    for part in re.split(r"[\[\]]", entry)[1].split(",")
}
"""(package, its extra): the extra of the root that brings it."""


def nodes(file, *words):
    """The nodes of a file that has one of these words; most have none, and are not parsed."""
    text = file.read_text(encoding="utf-8")
    return list(ast.walk(ast.parse(text))) if any(word in text for word in words) else []


def texts(file):
    """(line, text) of each text in a file about installing; what is formatted into one stays as {expression}."""
    found = nodes(file, "install")
    inside = {id(part) for node in found if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in found:
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else f"{{{ast.unparse(p.value)}}}" for p in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def handlers(file):
    """(line, source) of what a file does where an import fails."""
    for node in nodes(file, "ImportError", "ModuleNotFoundError"):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            names = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
            if names & {"ImportError", "ModuleNotFoundError"}:
                yield node.lineno, "\n".join(ast.unparse(statement) for statement in node.body)


def faults(message):
    """What is wrong with a message about a missing package."""
    found = LINE.search(message)
    if not found:
        return "no line to type"
    typed, package, extra = found.groups()
    known = project(ROOT / "packages" / package)["optional-dependencies"]
    if extra.startswith("{"):
        return ""
    if extra not in known:
        return f"{package} has no extra {extra}"
    wanted = IN_ROOT.get((package, extra))
    return "" if typed == wanted else f"the root's extra is {wanted}, and the message says {typed}"


MESSAGES = [(file, line, text) for file in SOURCES for line, text in texts(file) if "pip install '" in text]
EXTRAS = [
    (file, node.lineno, node.args[1].value)
    for file in SOURCES
    for node in nodes(file, "missing_extra")
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "missing_extra"
]
"""Calls of image_rewards' own maker of such messages."""


def label(value):
    return f"{value.relative_to(ROOT).parts[1]}/{value.name}" if isinstance(value, Path) else None


def test_they_are_found():
    assert len(MESSAGES) >= 10
    assert len(EXTRAS) >= 6
    assert faults("pip install x") == "no line to type"
    assert faults("pip install './packages/image-rewards[nope]'") == "image-rewards has no extra nope"
    assert "extra is ocr" in faults("uv run --extra models …, or pip install './packages/image-rewards[ocr]'")
    assert "extra is video" in faults("pip install './packages/run-report[video]'")


@pytest.mark.parametrize(("file", "line", "text"), MESSAGES, ids=label)
def test_the_line_can_be_typed(file, line, text):
    if file.name != "errors.py":  # its text is made below
        # `{name}` of a tracker stands for an extra of its own name, and all of them are in the root's.
        text = text.replace("run-report[{name}]", "run-report[trackers]").replace("apps/{config.app}", "apps/flowgrpo")
        assert faults(text) == "", f"{file}:{line}: {text}"


@pytest.mark.parametrize(("file", "line", "extra"), EXTRAS, ids=label)
def test_a_reward_s_line_can_be_typed(file, line, extra):
    assert faults(str(missing_extra("it", extra, "the reward"))) == "", f"{file}:{line}"


def test_where_an_import_fails_the_line_is_said():
    """But where the module is a person's own, named in the config: then the cause is said."""
    silent = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in SOURCES
        for line, body in handlers(file)
        if "raise" in body
        and not any(word in body for word in ("pip install", "missing_extra(", "_INSTALL", "{error}"))
    ]
    assert silent == []


def test_every_extra_of_the_root_has_a_line_in_a_readme():
    pages = "".join(p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *ROOT.glob("packages/*/README.md")])
    for extra in ROOT_PROJECT["optional-dependencies"]:
        assert f"--extra {extra}" in pages, f"no README says what `--extra {extra}` is for"

"""The pages in docs/: short, linked, and complete where they promise to be."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
from ray_trainer.keys import known_keys
from ray_trainer.values import is_section

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
GROUPS = "actor|advantages|correction|forwards|pairs|perf|reward|rollout|sync|time|val|watchdog"


def documented():
    """Patterns of the metrics that docs/metrics.md has; NAME in it stands for any word."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = re.findall(rf"`(step|(?:{GROUPS})/\w+)`", text)
    return [re.compile(name.replace("NAME", "[a-z0-9_]+")) for name in names]


def missing(names):
    known = documented()
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in known))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_is_short_and_linked(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 120
    for place in ("README.md", "CONTRIBUTING.md"):
        assert f"](docs/{page.name})" in (ROOT / place).read_text(encoding="utf-8"), (
            f"{place} has no link to {page.name}"
        )


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_files_that_a_page_names_exist(page):
    sources = [ROOT, *ROOT.glob("packages/*/src"), *ROOT.glob("packages/*/src/*"), *ROOT.glob("packages/*")]
    for name in re.findall(r"`((?:\w[\w-]*/)*[\w-]+\.(?:py|md|yaml))`", page.read_text(encoding="utf-8")):
        assert any((source / name).exists() for source in sources), f"{page.name} names {name}, which is nowhere"


def keys_of(tree, prefix=""):
    """Every dotted key of a recipe, sections included."""
    inner = tree.items() if isinstance(tree, dict) else ()
    return {prefix}.union(*(keys_of(value, f"{prefix}.{key}".lstrip(".")) for key, value in inner))


def test_every_key_is_used_by_a_recipe_or_explained_on_a_page():
    recipes = [file for place in ("apps", "packages") for file in ROOT.glob(f"{place}/*/src/**/recipes/*.yaml")]
    known = set().union(*(keys_of(yaml.safe_load(file.read_text(encoding="utf-8"))) for file in recipes))
    for page in [*ROOT.glob("*.md"), *PAGES, *ROOT.glob("packages/*/*.md"), *ROOT.glob("apps/*/*.md")]:
        known |= set(re.findall(r"[a-z_][a-z_0-9]*(?:\.[a-z_0-9]+)+(?:\.\*)?", page.read_text(encoding="utf-8")))
    keys = [key for key, kind in known_keys().items() if is_section(kind) is None and key not in ("app", "recipe")]
    assert [key for key in keys if not {key, key.rpartition(".")[0] + ".*"} & known] == []


def test_every_key_on_the_page_of_keys_exists():
    named = re.findall(
        r"`([a-z_][a-z_0-9]*(?:\.[a-z_0-9]+)+)[^`]*`", (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    )
    assert len(named) > 50
    assert set(named) <= set(known_keys())


def keys_page():
    spec = importlib.util.spec_from_file_location("keys_page", ROOT / "tools" / "keys_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_every_key_is_what_the_dataclasses_say():
    made = keys_page()
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run tools/keys_page.py"


def test_the_page_of_every_key_has_each_of_them_once_and_says_what_it_does():
    rows = re.findall(r"^\| `([^`]+)` \|.*\| (.*) \|$", keys_page().page(), re.M)
    named = [key for key, _ in rows]
    keys = {key for key, kind in known_keys().items() if is_section(kind) is None and key not in ("app", "recipe")}
    assert len(named) == len(set(named))
    assert {key.partition(".NAME.")[0] for key in named} - {"actor.fsdp_config.mixed_precision"} == keys
    assert [key for key, text in rows if not text] == []


def test_keys_that_the_page_of_other_trainers_offers_exist():
    text = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    offered = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ")]
    named = set(re.findall(r"`((?:actor|algorithm|data|model|reward|rollout|trainer)(?:\.\w+)+)", " ".join(offered)))
    assert len(named) > 60
    assert named - set(known_keys()) == set()


def test_every_metric_of_a_run_is_explained(finished_run):
    folder, _ = finished_run
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    assert len(rows[-1]) > 60
    assert missing({key for row in rows for key in row}) == []


def test_every_metric_that_the_code_names_is_explained():
    """Those of other algorithms and of other samplers too."""
    found = set()
    for source in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")]:
        found |= set(re.findall(rf'"((?:{GROUPS})/[a-z0-9_]+)"', source.read_text(encoding="utf-8")))
    assert len(found) > 60
    assert missing(found) == []


def test_a_metric_without_a_line_is_found():
    assert missing(["actor/grad_norm", "actor/of_tomorrow", "val/anything_mean"]) == ["actor/of_tomorrow"]


def test_every_metric_says_what_to_do():
    lines = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines if line.startswith("| `")]
    assert len(rows) > 35
    assert all(len(row) == 3 and row[1] and (row[2].strip("| ") or "`step`" in row[0]) for row in rows)

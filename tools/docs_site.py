"""Brings the repository's pages into the site, under the paths that they have here: no text is written twice.

MkDocs calls these functions (`mkdocs.yml`). A link from page to page is then right as it stands; a folder becomes its README, and
any other file that a page links to is copied.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "apps/*/*.md", "packages/*/*.md")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def linked(page: Path) -> dict[str, Path]:
    """Every file or folder of the repository that a page links to, by the text of the link."""
    found = {text: (page.parent / text).resolve() for text in LINK.findall(page.read_text(encoding="utf-8"))}
    return {text: place for text, place in found.items() if place.exists()}


def on_config(config: Any) -> Any:
    """The sources that docstrings are read from, and a page of the API for each package."""
    packages = sorted(path.name for path in ROOT.glob("packages/*/src/*") if (path / "__init__.py").exists())
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(p) for p in ROOT.glob("packages/*/src")]
    config.nav.append({"API": [{name: f"api/{name}.md"} for name in packages]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """The theme's own files, and the repository's in place of what MkDocs found in `docs_dir`."""
    kept = Files([file for file in files if not str(file.abs_src_path or "").startswith(config.docs_dir)])
    pages = [page for pattern in PAGES for page in ROOT.glob(pattern)]
    css = ROOT / "docs" / "pictures" / "site.css"
    targets = {target for page in pages for target in linked(page).values() if target.is_file()}
    for path in sorted({*pages, *targets, css}):
        kept.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for (name,) in config.nav[-1]["API"]:
        kept.append(File.generated(config, f"api/{name}.md", content=f"# `{name}`\n\n::: {name}\n"))
    return kept


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to folders lead to their READMEs."""
    if page.file.abs_src_path is None:
        return markdown
    folders = {text for text, place in linked(Path(page.file.abs_src_path)).items() if place.is_dir()}
    return LINK.sub(lambda m: f"{m[1].rstrip('/')}/README.md" if m[1] in folders else m[1], markdown)

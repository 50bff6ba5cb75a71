"""Reads the imports of every package; fails on an arrow that the architecture does not have, and on a ring inside a package.

    python tools/check_layers.py

Standard library only. Prints one line per fault and exits 1, or one sentence and exits 0.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ENGINE = {"sde_samplers", "diffusion_losses", "lora_sync", "model_specs"}
LOOP = {"fsdp_diffusers_engine", "omni_rollout", "image_rewards"}
MAY_IMPORT: dict[str, set[str]] = {
    "sde_samplers": set(),
    "diffusion_losses": set(),
    "lora_sync": set(),
    "image_rewards": set(),
    "model_specs": set(),
    "run_report": set(),
    "fsdp_diffusers_engine": ENGINE,
    "omni_rollout": {"sde_samplers", "lora_sync", "model_specs"},
    # The loop is the one place that sees both sides, so it may also name what they are made of.
    "ray_trainer": LOOP | ENGINE | {"run_report"},
    "flowgrpo": {"ray_trainer", "run_report"} | LOOP | ENGINE,
    "dpo_online": {"ray_trainer", "run_report"} | LOOP | ENGINE,
}
# Third parties that a package must never import while it is itself imported: extras, or somebody else's business.
LAZY_ONLY: dict[str, set[str]] = {
    "sde_samplers": {"diffusers", "triton", "ray"},
    "diffusion_losses": {"diffusers", "peft", "ray"},
    "lora_sync": {"diffusers", "peft", "ray"},
    "image_rewards": {"ray", "torch", "transformers", "fastapi", "httpx", "rapidocr"},
    "model_specs": {"ray", "peft"},
    "run_report": {"torch", "ray", "diffusers", "rich"},
    "fsdp_diffusers_engine": {"ray"},
    "omni_rollout": {"ray", "diffusers", "model_specs", "vllm", "vllm_omni", "peft"},
    "ray_trainer": {"ray", "diffusers", "transformers"},
    "flowgrpo": {"ray", "diffusers"},
    "dpo_online": {"ray", "diffusers"},
}
# Modules that exist to be loaded by an optional dependency, and may therefore import it at the top.
PLUGINS = {"omni_rollout": ("vllm_omni",), "sde_samplers": ("fast/triton_kernels.py",)}
# Rings that are still there. The list only shrinks: a ring that is gone must leave it.
KNOWN_RINGS: dict[str, set[str]] = {}


def imports(tree: ast.AST) -> list[tuple[str, int, bool]]:
    """(top-level name, line, at import time) of every absolute import. `if TYPE_CHECKING:` does not count as import time."""
    found: list[tuple[str, int, bool]] = []

    def visit(node: ast.AST, eager: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name.split(".")[0], node.lineno, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.module.split(".")[0], node.lineno, eager))
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or typing_only
        for child in ast.iter_child_nodes(node):
            visit(child, eager and not lazy)

    visit(tree, True)
    return found


def inner_imports(source: Path) -> dict[str, set[str]]:
    """Module -> modules of the same package that it imports anywhere: at the top, in a function, or for its types alone."""
    modules = {}
    for file in sorted(source.rglob("*.py")):
        parts = [source.name, *file.relative_to(source).with_suffix("").parts]
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, file in modules.items():
        package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & modules.keys()
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                target = ".".join([*above, *([node.module] if node.module else [])])
                full = {f"{target}.{alias.name}" for alias in node.names}
                # `from package import name` means the module of that name, else the package's own __init__
                graph[name] |= (full & modules.keys()) | ({target} & modules.keys() if full - modules.keys() else set())
        graph[name].discard(name)
    return graph


def ring(graph: dict[str, set[str]]) -> list[str] | None:
    """One ring of imports as [a, b, …, a], where a imports b; None when there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return None


def ring_problems(source: Path, known: set[str]) -> list[str]:
    """A ring in the package that is not among the known ones, and a known one that is gone."""
    graph = inner_imports(source)
    members = {f"{source.name}.{module}" for module in known}
    inside = {name: graph.get(name, set()) & members for name in members}
    lines = []
    if known and ring(inside) is None:
        lines.append(f"{source.name}: {', '.join(sorted(known))} are no ring any more; take them out of KNOWN_RINGS")
    if found := ring({name: after - members if name in members else after for name, after in graph.items()}):
        lines.append(f"{source.name}: a ring of imports, {' -> '.join(found)}; move what two modules need into a third")
    return lines


def problems(root: Path = ROOT, known_rings: dict[str, set[str]] = KNOWN_RINGS) -> list[str]:
    """One line per import, or ring of imports, that breaks a rule."""
    lines: list[str] = []
    for source in sorted([*root.glob("packages/*/src/*"), *root.glob("apps/*/src/*")]):
        package = source.name
        if package not in MAY_IMPORT:
            if source.is_dir() and (source / "__init__.py").exists():
                lines.append(
                    f"{source.relative_to(root)}: package {package!r} is not in MAY_IMPORT; say what it may import"
                )
            continue
        lines += ring_problems(source, known_rings.get(package, set()))
        for file in sorted(source.rglob("*.py")):
            where = file.relative_to(root)
            plugin = any(file.relative_to(source).is_relative_to(part) for part in PLUGINS.get(package, ()))
            for name, line, eager in imports(ast.parse(file.read_text(encoding="utf-8"))):
                if name in MAY_IMPORT and name != package and name not in MAY_IMPORT[package]:
                    allowed = ", ".join(sorted(MAY_IMPORT[package])) or "none of its siblings"
                    lines.append(f"{where}:{line}: {package} imports {name}; it may import {allowed}")
                if eager and not plugin and name in LAZY_ONLY[package]:
                    lines.append(
                        f"{where}:{line}: {package} imports {name} while being imported; do it inside the function"
                    )
    return lines


def main() -> int:
    """Print the verdict; returns the exit code."""
    found = problems()
    for line in found:
        print(line)
    print(f"check_layers: {len(found)} fault(s)" if found else "check_layers: every import keeps to its layer")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

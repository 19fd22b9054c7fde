"""Which modules of the service import which, wherever in a file the import is."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("executions", "providers", "sandbox_site")

Graph = Mapping[str, set[str]]


def modules_in(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, package: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """What the import statements of a file name, wherever they are in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                inside = f"{base}.{alias.name}"
                yield inside if inside in modules else base


def graph_of(modules: Mapping[str, Path]) -> Graph:
    """The modules that each module imports. Python loads the packages above an imported module
    too, except those above the importing module, which are being loaded already."""
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found = set()
        for name in imports_of(path, package, modules):
            parts = name.split(".")
            above = {".".join(parts[:end]) for end in range(1, len(parts))}
            found |= {name} | {each for each in above if not f"{module}.".startswith(f"{each}.")}
        graph[module] = (found & modules.keys()) - {module}
    return graph

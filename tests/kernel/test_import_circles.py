"""No modules of the service import one another in a circle, wherever in a file the import is.

import-linter shows forbidden directions, and cannot show circles. An import inside a function or
under TYPE_CHECKING counts here too: it only hides the circle.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel.import_graph import PACKAGES, ROOT, Graph, graph_of, modules_in

# Circles that still exist. Remove one from this list with its last import; add none.
_GUEST, _CODEINTERPRETER = "providers.runtime.guest", "providers.aliyun_codeinterpreter"
_SERVICE, _LAUNCHERS = "providers.runtime.service", "providers.runtime.launchers"
REMAINING: frozenset[frozenset[str]] = frozenset(
    frozenset(f"{package}.{name}" for name in names.split())
    for package, names in (
        (_CODEINTERPRETER, "commands files machine"),
        ("providers.e2b", "files machine processes"),
        (_GUEST, "cell context kept paths request"),
        (_GUEST, "display ipython shell"),
        (_LAUNCHERS, "oci warm_images"),
        (_SERVICE, "pool_manager registry"),
        ("providers.remote", "base contexts sandbox"),
        ("sandbox_site.web", "connections stopping"),
    )
)


def circles_in(graph: Graph) -> set[frozenset[str]]:
    """The groups of two or more modules each of which leads to all others of its group."""
    reached = {module: reached_from(module, graph) for module in graph}
    groups = {
        frozenset(other for other in found if module in reached[other])
        for module, found in reached.items()
    }
    return {group for group in groups if len(group) > 1}


def reached_from(module: str, graph: Graph) -> set[str]:
    found: set[str] = set()
    left = [module]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def edges_of(circle: frozenset[str], graph: Graph) -> str:
    """The imports within a circle, one a line."""
    lines = (f"{one} -> {other}" for one in circle for other in graph[one] & circle)
    return "\n".join(sorted(lines))


def test_there_are_no_import_circles_besides_the_remaining_ones() -> None:
    graph = graph_of(modules_in(ROOT, PACKAGES))
    assert len(graph) > 500
    found = circles_in(graph)

    new = found - REMAINING
    assert not new, "\n\n".join(edges_of(circle, graph) for circle in new)
    gone = REMAINING - found
    assert not gone, f"REMAINING lists circles that are none any more: {sorted(map(sorted, gone))}"


def test_executions_has_no_remaining_circle() -> None:
    assert not [
        circle for circle in REMAINING if any(each.startswith("executions") for each in circle)
    ]


@pytest.mark.parametrize(
    "import_of_a",
    [
        "import pkg.a",
        "from pkg import a",
        "from pkg.a import A",
        "from . import a",
        "from .a import A",
        "def f():\n    from pkg.a import A",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.a import A",
    ],
)
def test_an_import_anywhere_in_a_file_closes_a_circle(tmp_path: Path, import_of_a: str) -> None:
    write(tmp_path, a="from pkg import b\nA = 1", b="import pkg.c", c=import_of_a, d="import pkg.a")

    found = circles_in(graph_of(modules_in(tmp_path, ("pkg",))))

    assert found == {frozenset({"pkg.a", "pkg.b", "pkg.c"})}


def test_a_name_of_the_own_package_closes_a_circle_and_a_module_of_it_does_not(
    tmp_path: Path,
) -> None:
    write(tmp_path, __init__="from pkg.a import A\nB = 1", a="import pkg.b\nA = 1", b="")
    assert circles_in(graph_of(modules_in(tmp_path, ("pkg",)))) == set()

    write(tmp_path, b="from pkg import B")
    found = circles_in(graph_of(modules_in(tmp_path, ("pkg",))))

    assert found == {frozenset({"pkg", "pkg.a", "pkg.b"})}


def test_a_module_loads_the_packages_above_what_it_imports(tmp_path: Path) -> None:
    """Whoever imports `inner.leaf` first runs `inner`, which imports it back."""
    write(tmp_path, a="import pkg.inner.leaf")
    write(tmp_path / "pkg", "inner", __init__="import pkg.a", leaf="")

    found = circles_in(graph_of(modules_in(tmp_path, ("pkg",))))

    assert found == {frozenset({"pkg.a", "pkg.inner"})}


def write(root: Path, package: str = "pkg", **modules: str) -> None:
    (root / package).mkdir(exist_ok=True)
    for name, text in modules.items():
        (root / package / f"{name}.py").write_text(text)

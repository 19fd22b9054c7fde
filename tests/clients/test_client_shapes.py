"""The client speaks the API as it is described, and is one client with and without `await`."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import cofferdam
import pytest
from cofferdam import options
from cofferdam.decoding import decode
from cofferdam.errors import BY_CODE, UnexpectedAnswer
from cofferdam.shapes import Context, File, Session
from drf_spectacular.generators import SchemaGenerator

from providers.errors import CODES
from tests.support.processes import ROOT

PACKAGE = ROOT / "clients" / "python"
# By which method or argument else the client says it.
SAID_ELSEWHERE = {
    options.RunOptions: {"code", "mode", "session", "context", "webhook", "run_at"},
    options.SubmitOptions: {"code", "mode", "session", "context"},
    options.CellOptions: {"code", "mode", "webhook"},
    options.CommandOptions: {"command", "shell", "background"},
    options.SessionOptions: {"from"},
}
REQUESTS = {
    options.RunOptions: "ExecutionRequest",
    options.SubmitOptions: "ExecutionRequest",
    options.CellOptions: "Cell",
    options.CommandOptions: "Command",
    options.SessionOptions: "SessionRequest",
}


@pytest.fixture(scope="module")
def description() -> Any:
    return SchemaGenerator().get_schema(request=None, public=True)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(PACKAGE)
    for name in ("make_shapes", "make_sync"):
        # The client in TypeScript has a script of this name too.
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ("make_shapes", "make_sync"):
        sys.modules.pop(name, None)


def formatted(name: str, text: str) -> str:
    """As `ruff check --fix` and `ruff format` leave it."""
    for command in (["check", "--fix", "--exit-zero", "-q"], ["format", "-q"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", PACKAGE / name, "-"],
            input=text,
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        text = done.stdout
    return text


def test_its_answers_are_those_of_the_description(description: Any, scripts: None) -> None:
    made = importlib.import_module("make_shapes").shapes_of(description)
    name = "cofferdam/shapes.py"
    assert (PACKAGE / name).read_text() == formatted(name, made), "run make_shapes.py"


def test_its_requests_are_those_of_the_description(description: Any) -> None:
    components = description["components"]["schemas"]
    for shape, name in REQUESTS.items():
        ours = set(get_type_hints(shape)) - {"snapshot"}
        assert ours | SAID_ELSEWHERE[shape] == set(components[name]["properties"]), name
        assert not ours & SAID_ELSEWHERE[shape]


def test_every_path_that_it_asks_is_described(description: Any) -> None:
    """What it builds from constants, with {} for what is filled in."""
    known = {re.sub(r"\{\w+\}", "{}", path) for path in description["paths"]}
    text = "".join(path.read_text() for path in (PACKAGE / "cofferdam" / "_sync").glob("*.py"))
    below = {
        re.sub(r"\{[^}]*\}", "{}", tail) for tail in re.findall(r"self\._path\}(/[^\"]+)\"", text)
    }
    assert len(below) > 12
    for tail in below:
        places = (
            "/api/v1/sessions/{}",
            "/api/v1/sessions/{}/files",
            "/api/v1/sessions/{}/processes/{}",
        )
        assert any(place + tail in known for place in places), tail
    assert {"/api/v1/executions", "/api/v1/sessions", "/api/v1/usage"} <= known


def test_the_client_without_await_is_made_of_the_other(scripts: None) -> None:
    made = importlib.import_module("make_sync").made()
    folder = PACKAGE / "cofferdam" / "_sync"
    assert sorted(made) == sorted(path.name for path in folder.glob("*.py"))
    for name, text in made.items():
        assert (folder / name).read_text() == formatted(f"cofferdam/_sync/{name}", text), name


@pytest.mark.parametrize("name", ["Cofferdam", "OpenSession", "RunStream", "BackgroundProcess"])
def test_both_clients_can_do_the_same(name: str) -> None:
    with_await = getattr(cofferdam, f"Async{name}")
    without = getattr(cofferdam, name)
    ours = {each for each in dir(without) if not each.startswith("_")}
    assert ours == {each.replace("aclose", "close") for each in dir(with_await) if each[0] != "_"}
    for each in sorted(ours - {"close"}):
        one, other = getattr(without, each), getattr(with_await, each)
        if callable(one):
            assert list(inspect.signature(one).parameters) == list(
                inspect.signature(other).parameters
            )


def test_each_code_of_the_service_has_an_error() -> None:
    assert set(CODES) <= set(BY_CODE)


def test_an_answer_may_be_newer_and_may_not_lack_anything() -> None:
    told = {"path": "a", "type": "socket", "size_bytes": 1, "mode": 420, "modified_at": None}
    file = decode(File, {**told, "newer": [1]})
    assert (file.type, file.target, file.raw["newer"]) == ("socket", None, [1])
    moved = decode(File, {**told, "modified_at": "2026-01-02T03:04:05Z"})
    assert moved.modified_at == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    for wrong, named in (
        ({"id": "default", "language": "python"}, "Context.cwd is missing"),
        ({"id": 7, "language": "python", "cwd": ""}, "Context.id has the wrong type"),
        ([], "Context has the wrong type"),
    ):
        with pytest.raises(UnexpectedAnswer, match=named):
            decode(Context, wrong)
    with pytest.raises(UnexpectedAnswer, match=r"Session\.id is missing"):
        decode(Session, {})


def test_the_package_names_what_it_needs_and_what_it_holds() -> None:
    told = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    project = told["project"]
    assert (project["name"], project["requires-python"]) == ("cofferdam-client", ">=3.11")
    assert [re.split(r"\W", each)[0] for each in project["dependencies"]] == ["httpx"]
    module, _, function = project["scripts"]["cofferdam"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    packages = {
        ".".join(path.parent.relative_to(PACKAGE).parts)
        for path in (PACKAGE / "cofferdam").rglob("__init__.py")
    }
    assert set(told["tool"]["setuptools"]["packages"]) == packages
    assert told["tool"]["setuptools"]["package-data"] == {"cofferdam": ["py.typed"]}
    assert (PACKAGE / "cofferdam" / "py.typed").is_file()
    assert set(cofferdam.__all__) <= set(dir(cofferdam))


def test_it_imports_nothing_of_the_server() -> None:
    code = "import sys, cofferdam.cli.main; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(PACKAGE)},
        cwd=Path("/"),
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert {"cofferdam", "httpx"} <= loaded
    assert not loaded & {"django", "executions", "providers", "pydantic", "requests"}

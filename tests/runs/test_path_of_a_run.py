"""How many files of the project and SQL statements one synchronous run and one cell pass, and of
how many value objects a run is made.

The budgets are what was measured. They may only become smaller.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from providers.manager import manager
from tests.conftest import Caller
from tests.support.processes import ROOT
from tests.support.running import run
from tests.support.sessions import cell, opened

pytestmark = pytest.mark.usefixtures("no_lookup_grows_old")

OURS = tuple(f"{ROOT}/{name}/" for name in ("executions", "providers", "sandbox_site"))
FILES_OF_A_RUN = 67
STATEMENTS_OF_A_RUN = 12
VALUE_OBJECTS_OF_A_RUN = 12
FILES_OF_A_CELL = 75
STATEMENTS_OF_A_CELL = 16
# It starts a thread where none is idle, which is a matter of the moment.
THREADS = "providers/threads.py"


@contextmanager
def traced() -> Iterator[tuple[set[str], CaptureQueriesContext]]:
    """Record the project's files whose functions this thread calls, and its statements."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(OURS):
            files.add(name.removeprefix(f"{ROOT}/"))

    with CaptureQueriesContext(connection) as statements:
        sys.setprofile(note)
        try:
            yield files, statements
        finally:
            sys.setprofile(None)


def shortest(act: Callable[[], None]) -> tuple[set[str], list[dict[str, str]]]:
    """The files and statements of the shortest of three: on a slow machine a lookup that is made
    once a second falls into one of them."""
    found = []
    for _ in range(3):
        with patch.object(manager, "_check_seconds", 3600), traced() as (files, statements):
            act()
        found.append((files - {THREADS}, statements.captured_queries))
    return min(found, key=lambda each: (len(each[1]), len(each[0])))


def test_a_run_passes_no_more_files_and_statements_than_its_budget(
    local_active: None, alice: Caller
) -> None:
    def act() -> None:
        assert run(alice, "print(2)").json()["stdout"] == "2\n"

    act()
    files, statements = shortest(act)
    assert len(files) <= FILES_OF_A_RUN, sorted(files)
    assert len(statements) <= STATEMENTS_OF_A_RUN, statements


@pytest.mark.usefixtures("kept_here")
def test_a_cell_passes_no_more_files_and_statements_than_its_budget(alice: Caller) -> None:
    session = opened(alice)

    def act() -> None:
        assert cell(alice, session, "print(2)").json()["stdout"] == "2\n"

    act()
    files, statements = shortest(act)
    assert len(files) <= FILES_OF_A_CELL, sorted(files)
    assert len(statements) <= STATEMENTS_OF_A_CELL, statements


def test_a_run_makes_no_more_kinds_of_value_objects_than_its_budget(
    local_active: None, alice: Caller
) -> None:
    made: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or frame.f_code.co_name != "__init__":
            return
        kind = type(frame.f_locals.get("self"))
        if is_dataclass(kind) and kind.__module__.startswith(("executions.", "providers.")):
            made.add(f"{kind.__module__}.{kind.__qualname__}")

    run(alice, "print(1)")
    sys.setprofile(note)
    try:
        assert run(alice, "print(2)").json()["stdout"] == "2\n"
    finally:
        sys.setprofile(None)
    assert len(made) <= VALUE_OBJECTS_OF_A_RUN, sorted(made)

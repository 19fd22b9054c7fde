"""An answer whose program missed a package says what there is, and who lets more through."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.test import Client
from django.urls import reverse

from executions.doors.mcp.tools import TOOLS
from executions.runs import extensions
from executions.runs.advice import MOST_ADVICE, Missed, importable, missed_by
from executions.runs.extensions import Extension
from executions.runs.models import Execution
from providers.templates.resolve import NPM as REGISTRY
from providers.values import Packages
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.networks import REFUSED, attempts, listed
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]

NO_MODULE = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'polars'\n"
NO_VERSION = "ERROR: No matching distribution found for polars\n"
NPM = f"npm error request to {REGISTRY}/left-pad failed, reason: EAI_AGAIN\n"
RULES = "pypi.org and files.pythonhosted.org"
PACKAGES = {"pandas": "3.0", "numpy": "2.4", "et_xmlfile": "2.0"}


def advised(caller: Caller, **body: Any) -> list[str]:
    answer = run(caller, "1", **body).json()
    told: list[str] = answer["advice"]
    assert caller.client.get(f"/api/v1/executions/{answer['id']}").json()["advice"] == told
    return told


def test_a_missing_module_is_named_with_what_there_is(liar: Liar, alice: Caller) -> None:
    liar.does("get_packages", lambda: Packages("ready", "", PACKAGES))
    liar.answers(stderr=NO_MODULE, exit_code=1)
    answer = run(alice, "1").json()
    first, second = answer["advice"]
    assert first == "There is no module 'polars'. There are: numpy, pandas, et-xmlfile."
    assert second == (
        f"pip reaches no registry: this installation allows no network. An administrator can add "
        f"a network list with the rules {RULES}."
    )
    # What the program said is left as it was.
    assert answer["stderr"] == NO_MODULE


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        (Packages("preparing"), "Packages are being installed now: try again in a minute."),
        (Packages("ready"), "There are: Python's standard library alone."),
        (
            Packages("failed", "no package registry could be reached"),
            "There are: Python's standard library alone. The installation of packages failed: no "
            "package registry could be reached.",
        ),
        (
            Packages("ready", "", {f"p{number:02}": "1" for number in range(20)}),
            "There are: " + ", ".join(f"p{number:02}" for number in range(15)) + ", 5 more.",
        ),
        (None, ""),
    ],
)
def test_the_state_of_the_packages_is_told(
    liar: Liar, alice: Caller, packages: Packages | None, said: str
) -> None:
    liar.does("get_packages", lambda: packages)
    liar.answers(stderr=NO_MODULE, exit_code=1)
    assert advised(alice)[0] == f"There is no module 'polars'. {said}".strip()


def test_the_list_that_does_not_let_the_installer_through_is_named(
    liar: Liar, alice: Caller
) -> None:
    liar.answers(stderr=NO_VERSION, exit_code=1)
    listed("pypi.org")
    [told] = advised(alice)
    assert told == (
        f"pip reaches no registry: the installation's network list lacks the rules {RULES}. Ask an "
        "administrator to add them."
    )


def test_the_tenants_own_list_is_named(liar: Liar, alice: Caller) -> None:
    liar.answers(stderr=NO_VERSION, exit_code=1)
    listed()
    listed("example.com", tenant=alice.tenant.slug)
    assert "the tenant's network list lacks" in advised(alice)[0]


def test_a_run_that_asked_for_no_network_is_told_to(liar: Liar, alice: Caller) -> None:
    liar.answers(stderr=NPM, exit_code=1)
    listed()
    [told] = advised(alice)
    host = urlsplit(REGISTRY).hostname
    assert told == (
        f"npm reaches no registry: this run has no network for it. Allow {host} with "
        "the field network."
    )


def test_where_the_installer_gets_through_that_is_said(liar: Liar, alice: Caller) -> None:
    liar.does("holds_network", lambda: True)
    liar.answers(stderr=NO_MODULE, exit_code=1)
    listed("pypi.org", "files.pythonhosted.org")
    network = {"allow": ["pypi.org", "files.pythonhosted.org"]}
    assert advised(alice, network=network)[-1] == (
        f"`pip install` can add packages: its network reaches {RULES}."
    )


def test_a_refused_host_is_told_once_and_who_can_add_it(liar: Liar, alice: Caller) -> None:
    liar.does("holds_network", lambda: True)
    told = attempts(REFUSED, REFUSED).to_json()
    liar.answers(metadata={"network": told}, stderr=NO_VERSION, exit_code=1)
    listed("evil.test")
    found = advised(alice, network={"allow": ["evil.test"]})
    assert found[0].startswith("network: evil.test:443 was refused by the tenant's list; ask an")
    assert len([line for line in found if "evil.test" in line]) == 1


def test_a_failed_installation_whose_host_was_refused_is_told_in_one_line(
    liar: Liar, alice: Caller
) -> None:
    liar.does("holds_network", lambda: True)
    refused = {**REFUSED.to_json(), "host": "pypi.org", "layer": "installation"}
    told = {**attempts(REFUSED).to_json(), "attempts": [refused]}
    liar.answers(metadata={"network": told}, stderr=NO_VERSION, exit_code=1)
    listed("pypi.org")
    [found] = advised(alice, network={"allow": ["pypi.org"]})
    assert found.startswith("network: pypi.org:443 was refused by the installation's list")


def test_descriptions_say_what_code_can_import_with_every_provider() -> None:
    local = Packages("ready", "", PACKAGES)
    other = Packages("ready", "", {"numpy": "1.26"})
    said = "Python code can import numpy, pandas, et-xmlfile."
    assert importable({"local": local}) == said
    assert importable({"local": local, "other": other}) == "Python code can import numpy."
    assert importable({"local": Packages("ready")}) == (
        "Python code can import the standard library alone."
    )
    assert importable({"local": Packages("preparing")}) == (
        "Packages for Python code are being installed now."
    )
    assert importable({}) == ""
    for name in ("run_code", "session_run"):
        assert str(TOOLS[name].describe(["python"], said).description).endswith(said)
    assert said not in str(TOOLS["file_read"].describe(["python"], said).description)


def ended(exit_code: int | None, stdout: str = "", stderr: str = "", **more: Any) -> Execution:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return Execution(exit_code=exit_code, stdout=stdout, stderr=stderr, finished_at=at, **more)


@pytest.mark.parametrize(
    ("code", "stdout", "stderr"),
    [
        (0, "", NO_MODULE),
        (1, NO_MODULE, "another end\n"),
        (None, "", NO_MODULE),
        # A name that no module has can be typed wrongly in any language.
        (127, "", "bash: line 1: foo: command not found\n"),
        (1, "", "Error: Cannot find module './helper'\n"),
        # Left out of this machine's Python, and not to be installed.
        (1, "", "ModuleNotFoundError: No module named 'tkinter'\n"),
        (1, "", "ModuleNotFoundError: No module named 'a\x1b[2Jb'\n"),
    ],
)
def test_who_missed_nothing_is_told_nothing(code: int | None, stdout: str, stderr: str) -> None:
    assert missed_by(ended(code, stdout, stderr)) is None


@pytest.mark.parametrize(
    ("said", "installer"),
    [
        (NO_VERSION, "pip"),
        ("error: externally-managed-environment", "pip"),
        (NPM, "npm"),
        ("/bin/sh: 1: pip3: not found", "pip"),
        ("/bin/sh: 1: npm: not found", "npm"),
        ("/usr/bin/python3: No module named pip", "pip"),
    ],
)
def test_what_installs_is_known_by_what_it_says(said: str, installer: Any) -> None:
    """Whatever the exit code: a program may go on without, and a wait for the network ends late."""
    for code in (0, 1, None):
        assert missed_by(ended(code, said)) == missed_by(ended(code, "", said)) == Missed(installer)


def test_a_module_is_known_by_the_exception_of_a_long_output() -> None:
    told = {"type": "ModuleNotFoundError", "message": "No module named 'polars'", "traceback": ""}
    execution = ended(1, "", "x" * 200_000, exception=json.dumps(told))
    assert missed_by(execution) == Missed("pip", "polars")
    assert missed_by(ended(1, "", "Error: Cannot find module 'left-pad'\n")) == Missed(
        "npm", "left-pad"
    )


class Adviser(Extension):
    def advice(self, execution: Execution) -> Sequence[str]:
        return [f"The template science has it: {execution.exit_code}.", *map(str, range(10))]


class Broken(Extension):
    def advice(self, execution: Execution) -> Sequence[str]:
        raise ValueError("broken")


def test_a_capability_adds_advice_and_a_broken_one_takes_none_away(
    liar: Liar, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "_installed", [Broken(), Adviser()])
    liar.answers(exit_code=3)
    found = advised(alice)
    assert found[0] == "The template science has it: 3."
    assert len(found) == MOST_ADVICE


def test_who_may_not_read_a_record_is_told_none(liar: Liar, alice: Caller, bob: Caller) -> None:
    liar.answers(stderr=NO_MODULE, exit_code=1)
    told = run(alice, "1").json()
    bob.api_key.scopes = "execute"
    bob.api_key.save()
    answer = bob.client.get(f"/api/v1/executions/{told['id']}")
    assert answer.status_code in (403, 404) or answer.json()["advice"] == []


def test_the_page_of_an_execution_shows_it(liar: Liar, alice: Caller, admin_client: Client) -> None:
    liar.answers(stderr=NO_MODULE, exit_code=1)
    told = run(alice, "1").json()
    page = admin_client.get(reverse("admin:executions_execution_change", args=[told["id"]]))
    assert "There is no module &#x27;polars&#x27;" in page.content.decode()

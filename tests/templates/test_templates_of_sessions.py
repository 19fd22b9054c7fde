"""Templates of what programs have installed in a session."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client
from django.urls import reverse

from executions.capabilities.templates import additions
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.sessions.models import Session
from executions.tenants.keys import create_api_key
from executions.tenants.service import AUDITOR
from providers.templates.declaration import Declaration
from tests.conftest import Caller
from tests.support.package_index import PackageIndex
from tests.support.saved_files import asleep, still_asleep
from tests.support.sessions import cell, opened
from tests.support.templates import SCOPES, builder, built

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten", "kept_here")]

INSTALLED = """
import os
def installed(*folders, release="python3.11"):
    for folder in folders:
        where = f".local/lib/{release}/site-packages/{folder}"
        os.makedirs(where)
        open(f"{where}/METADATA", "w").write("Name: other")
"""
SIX = INSTALLED + "installed('six-1.17.0.dist-info', 'six', 'Py_Alpha-2.0rc1.dist-info')"
HOSTILE = (
    INSTALLED
    + """
installed("evil @ https:-1.0.dist-info", "--index-url=x-1.0.dist-info", "a;b-1.dist-info")
installed("a-1 --hash=x.dist-info", "<b>-1.0.dist-info", "six-none.dist-info", "-1.0.dist-info")
installed("other-1.0.dist-info", release="node")
open(".local/lib/python3.11/site-packages/file-1.0.dist-info", "w").close()
"""
)


@pytest.fixture(autouse=True)
def _index(index: PackageIndex) -> None:
    """Templates of this test have a place of their own."""


NPM = """
import json, os
os.makedirs("node_modules")
def at(key, version, **said):
    address = f"https://registry.example/{key}.tgz"
    return {f"node_modules/{key}": {"version": version, "resolved": address, **said}}
packages = {**at("dayjs", "1.11.0"), **at("@scope/name", "2.0.0-rc.1"), **at("inner", "1.0.0")}
packages |= at("dayjs/node_modules/inner", "3.0.0")
packages |= at("aliased", "1.0.0", name="other") | at("linked", "1.0.0", link=True)
packages |= at("git", "1.0.0", resolved="git+ssh://git@evil.example/x.git")
packages |= at("evil@1.0.0 --registry=x", "1") | at("range", "^1 || file:/etc") | {"": 1, "x": 2}
packages |= at("none", None) | at("number", 7) | at("../up", "1.0.0")
open("node_modules/.package-lock.json", "w").write(json.dumps({"packages": packages}))
def asks(text):
    open("package.json", "w").write(text)
"""


def made_of(caller: Caller, session: dict[str, Any], name: str = "mine") -> Any:
    return caller.client.post(f"/api/v1/sessions/{session['id']}/template", {"name": name})


def ran(caller: Caller, code: str, **body: Any) -> dict[str, Any]:
    session = opened(caller, **body)
    assert cell(caller, session, code).json()["status"] == "succeeded"
    return session


def page_of(session: dict[str, Any]) -> str:
    return reverse("admin:executions_template_of_session", args=[session["id"]])


def test_what_was_installed_is_declared_with_its_versions(alice: Caller) -> None:
    owner = builder(alice)
    answer = made_of(owner, ran(owner, SIX))
    assert answer.status_code == 202, answer.content
    version = TemplateVersion.objects.get()
    assert (version.state, version.template.tenant) == ("queued", alice.tenant)
    assert version.declared.python == ("py-alpha==2.0rc1", "six==1.17.0")
    assert version.requested_by == f"key:{owner.api_key.prefix}"
    assert answer["Location"].endswith("/api/v1/templates/mine/versions/1")


def test_the_template_of_the_session_comes_along(alice: Caller) -> None:
    owner = builder(alice)
    built(alice.tenant, environment={"COLOUR": "blue"}, files={"data/a.txt": "theirs"})
    session = ran(owner, SIX, template="science")
    assert made_of(owner, session, "science").status_code == 202
    version = TemplateVersion.objects.get(number=2)
    assert version.declared.environment == {"COLOUR": "blue"}
    assert version.declared.files == {"data/a.txt": b"theirs"}
    assert version.declared.python == ("py-alpha==2.0rc1", "six==1.17.0")
    assert made_of(owner, session, "science").status_code == 409


def test_a_session_that_sleeps_is_read_and_not_woken(alice: Caller) -> None:
    owner = builder(alice)
    session = asleep(owner, SIX)
    assert made_of(owner, session).status_code == 202
    assert still_asleep(session)


def test_folders_of_other_names_declare_nothing(alice: Caller, admin_client: Client) -> None:
    owner = builder(alice)
    session = ran(owner, HOSTILE)
    assert made_of(owner, session).status_code == 409
    shown = admin_client.get(page_of(session)).content.decode()
    assert "None." in shown
    assert not Template.objects.exists()


@pytest.mark.parametrize(
    ("asked", "declared"),
    [
        (
            '{"dependencies": {"dayjs": "^1", "@scope/name": "2", "absent": "1"}}',
            ("@scope/name@2.0.0-rc.1", "dayjs@1.11.0"),
        ),
        ("[]", ("@scope/name@2.0.0-rc.1", "dayjs@1.11.0", "inner@1.0.0")),
        ("{", ("@scope/name@2.0.0-rc.1", "dayjs@1.11.0", "inner@1.0.0")),
    ],
)
def test_packages_of_npm_are_declared_with_their_versions(
    asked: str, declared: tuple[str, ...], alice: Caller, admin_client: Client
) -> None:
    owner = builder(alice)
    session = ran(owner, f"{NPM}\nasks({asked!r})")
    assert made_of(owner, session).status_code == 202
    version = TemplateVersion.objects.get(template__name="mine")
    assert version.declared.npm == declared
    shown = admin_client.get(page_of(session)).content.decode()
    assert "dayjs@1.11.0" in shown
    assert "evil" not in shown


def test_packages_of_npm_replace_those_of_the_template(alice: Caller) -> None:
    owner = builder(alice)
    base = Declaration(npm=("@scope/name@1", "dayjs@^0.1", "left@1"))
    found = additions._others(base.npm, ("@scope/name@2.0.0", "dayjs@1.0"), additions._npm_name)
    assert found == ["left@1"]
    session = asleep(owner, f"{NPM}\nasks('')")
    assert made_of(owner, session).status_code == 202
    assert still_asleep(session)


def test_a_session_without_anything_installed_makes_no_template(alice: Caller) -> None:
    owner = builder(alice)
    answer = made_of(owner, opened(owner))
    assert answer.status_code == 409
    assert "installed nothing" in answer.json()["error"]["message"]


def test_a_stranger_and_a_narrow_key_make_none(alice: Caller, bob: Caller, charlie: Caller) -> None:
    session = ran(alice, SIX)
    assert made_of(builder(charlie), session).status_code == 404
    assert made_of(alice, session).status_code == 403
    held = Caller(*create_api_key(alice.tenant, "held", scopes=SCOPES, templates="science"))
    assert made_of(held, session).status_code == 403
    assert made_of(builder(alice), session, "No!").status_code == 400
    assert not Template.objects.exists()
    assert made_of(builder(bob), session).status_code == 202


def test_a_session_whose_tenant_is_gone_makes_none_for_the_installation(
    alice: Caller, admin_client: Client
) -> None:
    session = ran(alice, SIX)
    Session.objects.filter(pk=session["id"]).update(tenant=None)
    assert admin_client.post(page_of(session), {"name": "mine"}).status_code == 409
    assert not Template.objects.exists()


def test_the_page_of_a_session_leads_to_what_was_added_and_a_button(
    alice: Caller, admin_client: Client, client: Client
) -> None:
    session = ran(alice, SIX)
    of_session = reverse("admin:executions_session_change", args=[session["id"]])
    assert page_of(session) in admin_client.get(of_session).content.decode()
    shown = admin_client.get(page_of(session)).content.decode()
    for told in ("six==1.17.0", "py-alpha==2.0rc1", "Make a template of this session"):
        assert told in shown
    auditor = User.objects.create_user("audrey", password="S3cret!pass", is_staff=True)
    auditor.groups.add(Group.objects.get(name=AUDITOR))
    client.force_login(auditor)
    shown = client.get(page_of(session)).content.decode()
    assert "six==1.17.0" in shown
    assert "Make a template" not in shown
    assert client.post(page_of(session), {"name": "mine"}).status_code == 403
    client.force_login(User.objects.create_user("nils", password="S3cret!pass", is_staff=True))
    assert client.get(page_of(session)).status_code == 403
    assert admin_client.post(page_of(session), {"name": "No!"}).status_code == 400
    answer = admin_client.post(page_of(session), {"name": "mine"})
    version = TemplateVersion.objects.get()
    assert answer["Location"].endswith(f"/executions/templateversion/{version.pk}/change/")
    assert version.template.tenant == alice.tenant

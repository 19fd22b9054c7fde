"""The pages of templates, and the command."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from executions.capabilities.templates.documents import read_declaration, read_file, to_toml
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.templates.names import store
from executions.tenants.service import AUDITOR
from providers.errors import InvalidConfiguration
from providers.templates.declaration import Declaration
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.package_index import PackageIndex
from tests.support.templates import built, finished, resolves

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten", "resolver")]

TOML = 'python = ["tinymath"]\n\n[environment]\nCOLOUR = "blue"\n'
ADD = "admin:executions_template_add"
LIST = "admin:executions_template_changelist"


@pytest.fixture(autouse=True)
def _packages(index: PackageIndex, resolver: Liar) -> None:
    index.add("tinymath")
    resolves(resolver, index)


def form(**values: str) -> dict[str, str]:
    return {"tenant_slug": "", "name": "science", "description": "", "declaration": TOML, **values}


def page_of(template: Template) -> str:
    return reverse("admin:executions_template_change", args=[template.pk])


def test_a_template_is_declared_on_its_page_and_built(admin_client: Client, alice: Caller) -> None:
    answer = admin_client.post(reverse(ADD), form(tenant_slug=alice.tenant.slug))
    version = TemplateVersion.objects.get()
    assert answer["Location"] == page_of(version.template)
    assert version.template.tenant == alice.tenant
    finished(version)
    shown = admin_client.get(page_of(version.template)).content.decode()
    assert "Ready" in shown
    assert "tinymath" in shown
    page = reverse("admin:executions_templateversion_change", args=[version.pk])
    shown = admin_client.get(page).content.decode()
    for told in ("tinymath", "MIT", "sha256:", version.digest):
        assert told in shown


def test_what_is_no_declaration_is_told_beside_the_field(admin_client: Client) -> None:
    for text in ("python = [", 'base = "x"', 'python = ["x @ https://evil.test/x.whl"]', ""):
        answer = admin_client.post(reverse(ADD), form(declaration=text))
        assert answer.status_code == 200
        assert answer.context["adminform"].form.errors["declaration"]
    built(None)
    answer = admin_client.post(reverse(ADD), form())
    assert answer.context["adminform"].form.errors["name"]
    assert Template.objects.count() == 1


def test_a_changed_declaration_is_another_version(admin_client: Client) -> None:
    template = built(None).template
    red = {"declaration": '[environment]\nCOLOUR = "red"\n'}
    answer = admin_client.post(page_of(template), red)
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    newest = template.versions.order_by("-number").first()
    assert newest is not None
    assert (newest.number, newest.state) == (2, "ready")
    assert newest.declaration["environment"] == {"COLOUR": "red"}


def test_buttons_build_cancel_and_remove(admin_client: Client) -> None:
    template = built(None, python=["tinymath"]).template

    def press(action: str) -> None:
        chosen = {"action": action, "_selected_action": [str(template.pk)]}
        assert admin_client.post(reverse(LIST), chosen).status_code == 302

    press("build_selected")
    version = template.versions.get(number=2)
    assert version.state == "queued"
    press("cancel_selected")
    version.refresh_from_db()
    assert version.state == "cancelled"
    press("remove_selected")
    template.refresh_from_db()
    assert template.removed_at is not None


def test_an_auditor_looks_and_changes_nothing(client: Client) -> None:
    template = built(None).template
    ada = User.objects.create_user("ada", is_staff=True)
    ada.groups.add(Group.objects.get(name=AUDITOR))
    client.force_login(ada)
    assert client.get(page_of(template)).status_code == 200
    assert client.post(page_of(template), {"declaration": TOML}).status_code == 403
    assert client.post(reverse(ADD), form()).status_code == 403
    chosen = {"action": "remove_selected", "_selected_action": [str(template.pk)]}
    client.post(reverse(LIST), chosen)
    template.refresh_from_db()
    assert (template.removed_at, template.versions.count()) == (None, 1)


def command(*arguments: str) -> str:
    output = StringIO()
    call_command("template", *arguments, stdout=output)
    return output.getvalue()


def test_the_command_builds_lists_verifies_and_removes(alice: Caller, tmp_path: Path) -> None:
    file = tmp_path / "science.toml"
    file.write_text(f'name = "science"\n{TOML}')
    told = command("build", str(file), "--tenant", "wonderland")
    version = TemplateVersion.objects.get()
    assert f"science@1 is ready: {version.digest}" in told
    assert version.template.tenant == alice.tenant
    assert "science@2 is ready" in command("build", str(file), "--tenant", "wonderland")
    assert command("list") == ""
    assert "science@2 ready" in command("list", "--tenant", "wonderland")
    assert "as they were built" in command("verify")
    (module,) = store().path(version.digest).rglob("tinymath.py")
    module.unlink()
    with pytest.raises(CommandError) as failed:
        command("verify")
    assert failed.value.returncode == 1
    command("remove", "science", "--tenant", "wonderland")
    assert command("list", "--tenant", "wonderland") == ""


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "science.toml"
    with pytest.raises(CommandError, match="cannot be read"):
        command("build", str(file))
    file.write_text(TOML)
    with pytest.raises(CommandError, match="name"):
        command("build", str(file))
    file.write_text('name = "science"\npython = ["nonesuch @ file:///etc"]')
    with pytest.raises(CommandError, match="names an address"):
        command("build", str(file))
    with pytest.raises(CommandError, match="no tenant"):
        command("list", "--tenant", "nowhere")


def test_toml_reads_what_was_written() -> None:
    declared: dict[str, Any] = {
        "python": ["pandas>=2"],
        "npm": ["dayjs@^1"],
        "environment": {"A": 'quote " and \\ and \x7f\n'},
        "files": {"a b/ü.txt": "line\nline\ttab 😀", "b.bin": {"base64": "AP8="}},
        "run": ["echo 'a' > b.txt"],
        "start": "python server.py",
        "ready": "true",
        "network": {"mode": "allowlist", "rules": ["pypi.org"]},
        "limits": {"timeout": 5, "max_timeout": 7.5},
    }
    declaration = Declaration.parse(declared)
    assert read_declaration(to_toml(declaration)) == declaration
    document = read_file(f'name = "a"\ndescription = "b"\n{to_toml(declaration)}')
    assert document == ("a", "b", declaration)
    with pytest.raises(InvalidConfiguration, match="description"):
        read_file(f'name = "a"\ndescription = 1\n{TOML}')

"""Packages with advisories, and parts lists: what a build refuses, and what is shown of it."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from executions.capabilities.templates import builds
from executions.capabilities.templates.models import PackageAdvisory, TemplateVersion
from executions.ledger.models import LedgerEntry
from executions.tenants.service import AUDITOR
from providers.values import ArtifactFile
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.package_index import PackageIndex
from tests.support.templates import URL, again, built, finished, resolves

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten", "resolver")]

SCIENCE: dict[str, Any] = {"python": ["tinymath"]}


@pytest.fixture(autouse=True)
def _packages(index: PackageIndex, resolver: Liar) -> None:
    index.add("tinymath")
    resolves(resolver, index)


def advisory(
    advisory_id: str = "GHSA-1", name: str = "TinyMath", fixed: str = "1.5", kind: str = "PyPI"
) -> dict[str, Any]:
    ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": fixed}]}]
    affected = [{"package": {"ecosystem": kind, "name": name}, "ranges": ranges}]
    return {"id": advisory_id, "summary": "It sends <keys> away.", "affected": affected}


def load(folder: Path, *entries: dict[str, Any]) -> str:
    """What the command says."""
    path = folder / "advisories.json"
    path.write_text(json.dumps(entries))
    said = StringIO()
    call_command("template", "advisories", str(path), stdout=said)
    return said.getvalue()


def test_a_package_that_is_known_to_be_bad_is_not_even_fetched(
    alice: Caller, index: PackageIndex, tmp_path: Path
) -> None:
    load(tmp_path, advisory())
    index.requests.clear()
    version = built(alice.tenant, **SCIENCE)
    assert (version.state, version.digest) == ("failed", "")
    for told in ("tinymath 1.0", "GHSA-1", "It sends", "tinymath>=1.5", "TEMPLATE_ADVISORIES"):
        assert told in version.problem
    assert index.requests == []


def test_a_version_that_is_not_affected_is_built(alice: Caller, tmp_path: Path) -> None:
    load(tmp_path, advisory(fixed="1.0"), advisory("GHSA-2", "other"))
    load(tmp_path, advisory("GHSA-3", "tinymath", kind="npm"))
    assert built(alice.tenant, **SCIENCE).state == "ready"


def test_an_installation_may_only_be_shown_what_is_known(
    alice: Caller, admin_client: Client, settings: Any, tmp_path: Path
) -> None:
    settings.TEMPLATE_ADVISORIES = "show"
    load(tmp_path, advisory())
    version = built(alice.tenant, **SCIENCE)
    assert version.state == "ready"
    assert "tinymath 1.0: GHSA-1" in version.log
    told = {
        "id": "GHSA-1",
        "kind": "python",
        "name": "tinymath",
        "version": "1.0",
        "summary": "It sends <keys> away.",
        "fixed": "1.5",
    }
    assert alice.client.get(f"{URL}/science/versions/1").json()["advisories"] == [told]
    page = reverse("admin:executions_templateversion_change", args=[version.pk])
    shown = admin_client.get(page).content.decode()
    assert "GHSA-1" in shown
    assert "It sends &lt;keys&gt; away." in shown


def test_a_yanked_package_is_refused_as_one_with_an_advisory(
    alice: Caller, index: PackageIndex, resolver: Liar, settings: Any
) -> None:
    index.yanked["tinymath-1.0-py3-none-any.whl"] = "It loses <numbers>."
    resolves(resolver, index)
    refused = built(alice.tenant, **SCIENCE)
    assert refused.state == "failed"
    for told in ("tinymath 1.0: yanked It loses <numbers>.", "TEMPLATE_ADVISORIES=show"):
        assert told in refused.problem
    settings.TEMPLATE_ADVISORIES = "show"
    shown = again(refused.template, **SCIENCE)
    assert shown.state == "ready"
    assert "tinymath 1.0: yanked It loses <numbers>." in shown.log
    (said,) = alice.client.get(f"{URL}/science/versions/2").json()["advisories"]
    assert (said["id"], said["summary"], said["fixed"]) == ("yanked", "It loses <numbers>.", None)
    # It is kept with the version, whatever its index says by now.
    index.yanked.clear()
    settings.TEMPLATE_ADVISORIES = "refuse"
    assert again(shown.template).state == "failed"
    assert [each.yanked for each in shown.locked.packages] == ["It loses <numbers>."]


def test_a_resolver_that_does_not_say_what_was_yanked_is_refused(
    alice: Caller, index: PackageIndex, resolver: Liar
) -> None:
    lock = ArtifactFile("pylock.toml", "text/plain", index.pylock(*index.files).encode())
    for said in ([], [ArtifactFile("yanked.json", "text/plain", b"[]")]):
        resolver.answers(artifacts=[lock, *said])
        version = built(alice.tenant, f"science{len(said)}", **SCIENCE)
        assert (version.state, "yanked.json" in version.problem) == ("failed", True)


def test_a_later_file_counts_for_versions_that_are_ready(alice: Caller, tmp_path: Path) -> None:
    first = built(alice.tenant, **SCIENCE)
    place = f"{URL}/science/versions/1"
    assert alice.client.get(place).json()["advisories"] == []
    said = load(tmp_path, advisory())
    assert said.splitlines() == [
        "1 advisories on packages of python.",
        "wonderland science@1: tinymath 1.0: GHSA-1 It sends <keys> away.",
    ]
    assert [each["id"] for each in alice.client.get(place).json()["advisories"]] == ["GHSA-1"]
    # Its lock is known, and what was built is at hand. It is refused for all that.
    assert again(first.template).state == "failed"
    load(tmp_path, advisory("GHSA-2", "other"))
    assert alice.client.get(place).json()["advisories"] == []
    assert again(first.template).state == "ready"


def test_a_file_replaces_what_there_was_of_its_kinds(tmp_path: Path) -> None:
    load(tmp_path, advisory(), advisory("GHSA-2", "left-pad", kind="npm"))
    load(tmp_path, advisory("GHSA-3"), advisory("GHSA-4"), advisory("GHSA-4", fixed="2"))
    rows = PackageAdvisory.objects.order_by("advisory_id")
    assert [each.advisory_id for each in rows] == ["GHSA-2", "GHSA-3", "GHSA-4"]
    entry = LedgerEntry.objects.filter(kind="advisories").order_by("-sequence").first()
    assert entry is not None
    assert (entry.stated["action"], entry.stated["python"]) == ("loaded", 2)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"PK\x03\x04", b'[{"no": "id"}]'])
def test_a_file_that_cannot_be_read_takes_nothing_away(content: bytes, tmp_path: Path) -> None:
    load(tmp_path, advisory())
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(CommandError, match="cannot be read"):
        call_command("template", "advisories", str(path))
    assert PackageAdvisory.objects.get().advisory_id == "GHSA-1"


def test_the_parts_list_of_a_version_is_for_those_who_can_use_it(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    version = built(alice.tenant, **SCIENCE)
    built(None, "common", **SCIENCE)
    place = f"{URL}/science/versions/1/sbom"
    for caller in (alice, bob):
        said = caller.client.get(place).json()
        assert (said["bomFormat"], said["specVersion"]) == ("CycloneDX", "1.6")
        assert said["metadata"]["component"]["hashes"][0]["content"] == version.digest
        (component,) = said["components"]
        assert component["purl"] == "pkg:pypi/tinymath@1.0"
        assert component["licenses"] == [{"license": {"name": "MIT"}}]
    assert charlie.client.get(place).status_code == 404
    assert charlie.client.get(f"{URL}/common/versions/1/sbom").status_code == 200
    assert alice.client.get(f"{URL}/science/versions/2/sbom").status_code == 404


def test_what_was_not_built_has_no_parts_list(alice: Caller, tmp_path: Path) -> None:
    load(tmp_path, advisory())
    built(alice.tenant, **SCIENCE)
    assert alice.client.get(f"{URL}/science/versions/1/sbom").status_code == 409


def test_auditors_are_given_licences_and_the_parts_list(
    alice: Caller, admin_client: Client, client: Client
) -> None:
    version = built(alice.tenant, **SCIENCE)
    page = reverse("admin:executions_templateversion_change", args=[version.pk])
    parts = reverse("admin:executions_templateversion_sbom", args=[version.pk])
    auditor = User.objects.create_user("audrey", password="S3cret!pass", is_staff=True)
    auditor.groups.add(Group.objects.get(name=AUDITOR))
    client.force_login(auditor)
    for reader in (admin_client, client):
        shown = reader.get(page).content.decode()
        assert parts in shown
        assert "<td>MIT</td><td>tinymath</td>" in shown
        answer = reader.get(parts)
        assert answer.json()["components"][0]["name"] == "tinymath"
        assert 'filename="science-1.cdx.json"' in answer["Content-Disposition"]
    client.force_login(User.objects.create_user("nils", password="S3cret!pass", is_staff=True))
    assert client.get(parts).status_code == 403
    waits = builds.request_build(version.template, "test", refresh=True)
    unbuilt = reverse("admin:executions_templateversion_sbom", args=[waits.pk])
    assert admin_client.get(unbuilt).status_code == 404
    assert finished(waits).state == TemplateVersion.State.READY

"""Builds of templates: what is resolved, fetched and kept, and what ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from executions.capabilities.network.models import NetworkList
from executions.capabilities.retention import service as retention
from executions.capabilities.templates import build, builds, downloads
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.templates.names import store
from executions.kernel.coroutines import run_sync
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from executions.runs.requests import Conflict
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration, RateLimited
from providers.services.settings_cache import forget_all
from providers.templates.declaration import Declaration
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.networks import listed
from tests.support.package_index import PackageIndex
from tests.support.templates import again, built, finished, resolves

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]

SCIENCE: dict[str, Any] = {"python": ["tinymath"]}


@pytest.fixture(autouse=True)
def _packages(index: PackageIndex, resolver: Liar) -> None:
    index.add("tinymath")
    resolves(resolver, index)


def request(tenant: Any, **declared: Any) -> TemplateVersion:
    return builds.create(tenant, "science", Declaration.parse(declared or SCIENCE), "test")


@pytest.mark.parametrize(
    ("name", "description", "field"),
    [
        ("No!", "", "name"),
        ("", "", "name"),
        ("a" * 64, "", "name"),
        ("a", "d" * 301, "description"),
    ],
)
def test_what_cannot_be_a_template_is_refused_with_its_field(
    alice: Caller, name: str, description: str, field: str
) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        builds.create(alice.tenant, name, Declaration.parse(SCIENCE), "test", description)
    assert refused.value.field == field
    assert not Template.objects.exists()


def test_a_build_is_an_execution_of_the_tenant_and_its_files_have_a_digest(alice: Caller) -> None:
    version = built(alice.tenant, **SCIENCE)
    assert (version.state, version.problem) == ("ready", "")
    assert len(version.digest) == 64
    assert store().verify(version.digest) == ""
    assert [each.name for each in version.locked.packages] == ["tinymath"]
    assert version.licences == {"tinymath": "MIT"}
    execution = Execution.objects.get(request_id=f"template:{version.pk}")
    assert execution.pk == version.execution_id
    assert (execution.tenant_slug, execution.status) == (alice.tenant.slug, "succeeded")
    assert "Resolved" in version.log
    assert "tinymath 1.0" in version.log


def test_the_ledger_has_lock_and_digest_of_what_was_built(alice: Caller) -> None:
    version = built(alice.tenant, **SCIENCE)
    entry = LedgerEntry.objects.filter(kind="template_version").order_by("-sequence").first()
    assert entry is not None
    said = entry.stated
    assert (said["action"], said["template"], said["tenant"]) == ("built", "science", "wonderland")
    assert said["digest"] == version.digest
    assert said["lock_digest"] == version.locked.digest


def test_the_same_declaration_keeps_its_lock_and_takes_no_network(
    alice: Caller, index: PackageIndex, resolver: Liar
) -> None:
    first = built(alice.tenant, **SCIENCE)
    index.add("tinymath", "2.0")
    resolves(resolver, index)
    asked, runs = len(index.requests), Execution.objects.count()
    second = builds.request_build(first.template, "test")
    # It is ready at once: there is nothing to be fetched or unpacked.
    assert (second.state, second.number, second.digest) == ("ready", 2, first.digest)
    assert (len(index.requests), Execution.objects.count()) == (asked, runs)


def test_a_refreshed_build_resolves_anew(
    alice: Caller, index: PackageIndex, resolver: Liar
) -> None:
    first = built(alice.tenant, **SCIENCE)
    index.files.clear()
    index.add("tinymath", "2.0")
    resolves(resolver, index)
    second = finished(builds.request_build(first.template, "test", refresh=True))
    assert second.state == "ready", second.problem
    assert second.digest != first.digest
    assert [each.version for each in second.locked.packages] == ["2.0"]


def test_a_declaration_without_packages_needs_no_resolver(alice: Caller) -> None:
    version = built(alice.tenant, environment={"COLOUR": "blue"})
    assert version.state == "ready", version.problem
    assert not Execution.objects.exists()


def test_a_file_with_another_hash_than_its_lock_is_refused(
    alice: Caller, index: PackageIndex
) -> None:
    version = request(alice.tenant)
    (name,) = index.files
    index.files[name] = index.files[name][:-1] + b"!"
    finished(version)
    assert version.state == "failed"
    assert "has another hash than its lock" in version.problem
    assert store().digests() == []


def test_an_address_outside_of_the_index_is_not_fetched(
    alice: Caller, index: PackageIndex, resolver: Liar
) -> None:
    host = index.url.removeprefix("http://")
    port = int(host.rpartition(":")[2])
    elsewhere = f"127.0.0.1:{port - 1}"
    NetworkList.objects.all().delete()
    listed(host, elsewhere)
    lock = index.pylock(*index.files).replace(host, elsewhere)
    index.url = index.url.replace(host, elsewhere)
    resolves(resolver, index)
    assert elsewhere in lock
    version = finished(request(alice.tenant))
    assert version.state == "failed"
    assert "is not on the network list of the package index" in version.problem
    assert not any(path.startswith("/files/") for path in index.requests)


def test_an_address_inside_of_this_network_is_not_fetched(
    alice: Caller, index: PackageIndex, settings: Any
) -> None:
    settings.NETWORK_ALLOWED_ADDRESSES = []
    version = finished(request(alice.tenant))
    assert version.state == "failed"
    assert "may not be fetched" in version.problem
    assert index.requests == []


def test_without_a_list_that_allows_the_index_nothing_runs(alice: Caller) -> None:
    NetworkList.objects.all().delete()
    forget_all()
    version = finished(request(alice.tenant))
    assert version.state == "failed"
    assert "The package index cannot be reached" in version.problem
    assert not Execution.objects.exists()


def test_a_resolver_that_fails_says_why(alice: Caller, resolver: Liar) -> None:
    resolver.answers(stderr="error: no wheel of nonesuch\n", exit_code=1)
    version = finished(request(alice.tenant))
    assert version.state == "failed"
    assert "no wheel of nonesuch" in version.problem
    assert "no wheel of nonesuch" in version.log


def test_a_resolver_that_leaves_no_lock_is_refused(alice: Caller, resolver: Liar) -> None:
    resolver.answers()
    assert "left no pylock.toml" in finished(request(alice.tenant)).problem


def test_a_build_that_is_cancelled_while_it_fetches_leaves_nothing(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = request(alice.tenant)
    monkeypatch.setattr(build, "_SAY_EVERY", 0.0)

    def cancelling(network: Any, keep_on: Callable[[], None]) -> Any:
        fetch = downloads.fetcher(network, keep_on)

        def fetch_and_cancel(address: str, most: int) -> Iterator[bytes]:
            run_sync(builds.cancel_build(TemplateVersion.objects.get(pk=version.pk), "key:test"))
            yield from fetch(address, most)

        return fetch_and_cancel

    monkeypatch.setattr(build, "fetcher", cancelling)
    finished(version)
    assert (version.state, version.digest) == ("cancelled", "")
    assert version.problem == "Cancelled by key:test."
    assert store().digests() == []


def test_a_build_that_is_cancelled_while_it_resolves_ends_its_execution(
    alice: Caller, resolver: Liar
) -> None:
    version = request(alice.tenant)

    def cancel() -> Any:
        raise AssertionError("nothing is run")

    resolver.does("run", cancel)
    row = TemplateVersion.objects.get(pk=version.pk)
    run_sync(builds.cancel_build(row, "key:test"))
    finished(version)
    assert version.state == "cancelled"
    assert not Execution.objects.exists()


def test_one_build_of_a_template_is_under_way_at_most(alice: Caller) -> None:
    version = request(alice.tenant)
    with pytest.raises(Conflict):
        builds.request_build(version.template, "test")
    with pytest.raises(IntegrityError), transaction.atomic():
        TemplateVersion.objects.create(
            template=version.template, number=2, declaration={}, requested_by="test"
        )


def test_one_process_builds_it(alice: Caller) -> None:
    version = request(alice.tenant)
    assert builds.build_one(version.pk)
    assert not builds.build_one(version.pk)


def test_a_build_whose_process_died_fails(alice: Caller) -> None:
    version = request(alice.tenant)
    TemplateVersion.objects.filter(pk=version.pk).update(
        state="building", claimed_until=timezone.now() - timedelta(seconds=1)
    )
    assert builds.fail_abandoned() == 1
    version.refresh_from_db()
    assert (version.state, version.problem) == (
        "failed",
        "Its process has ended. Build it again.",
    )
    assert again(version.template).state == "ready"


def test_a_version_that_was_changed_before_it_is_built_is_refused(alice: Caller) -> None:
    version = request(alice.tenant)
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE executions_templateversion SET declaration = %s",
            ['{"python": ["evil"], "npm": []}'],
        )
    finished(version)
    assert version.state == "failed"
    assert "changed in the database" in version.problem
    assert not Execution.objects.exists()


def test_a_tenant_has_so_many_templates_and_bytes(alice: Caller, settings: Any) -> None:
    settings.TEMPLATES_PER_TENANT = 1
    version = built(alice.tenant, **SCIENCE)
    with pytest.raises(RateLimited) as refused:
        built(alice.tenant, "other")
    assert refused.value.field == "templates"
    # The installation's are not counted.
    assert built(None, "other").state == "ready"
    settings.TEMPLATES_MB_PER_TENANT = 0
    with pytest.raises(RateLimited) as refused:
        builds.request_build(version.template, "test")
    assert refused.value.field == "template_bytes"


def test_the_installations_templates_take_two_persons_where_the_rule_holds(
    alice: Caller, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    version = built(None, environment={"A": "1"})
    assert version.state == "pending"
    with pytest.raises(Conflict):
        builds.approve(version, "test")
    builds.approve(version, "another")
    assert finished(version).state == "ready"
    assert version.approved_by == "another"
    assert built(alice.tenant).state == "ready"


def test_who_skips_the_second_person_in_the_database_has_nothing_built(settings: Any) -> None:
    settings.TWO_PERSON_RULE = True
    version = built(None, environment={"A": "1"})
    with connection.cursor() as cursor:
        cursor.execute("UPDATE executions_templateversion SET state = 'queued'")
    assert "No second administrator" in finished(version).problem


def test_versions_that_nothing_uses_go_with_their_files(
    alice: Caller, index: PackageIndex, resolver: Liar
) -> None:
    first = built(alice.tenant, **SCIENCE)
    second = again(first.template, environment={"COLOUR": "red"})
    assert builds.remove_unused() == 0
    old = timezone.now() - timedelta(days=40)
    TemplateVersion.objects.update(ended_at=old)
    assert builds.remove_unused() == 1
    # The newest one that is ready stays.
    assert list(TemplateVersion.objects.all()) == [second]
    assert store().digests() == [second.digest]
    run_sync(builds.remove(second.template, "test"))
    Template.objects.update(removed_at=old)
    assert builds.remove_unused() == 1
    assert not Template.objects.exists()
    assert store().digests() == []


def test_the_templates_of_a_removed_tenant_go_with_it(alice: Caller) -> None:
    built(alice.tenant, **SCIENCE)
    tenant = alice.tenant
    tenant.is_active = False
    tenant.save()
    retention.begin(tenant)
    while retention.go_on():
        pass
    assert not Template.objects.exists()
    assert not Tenant.objects.filter(pk=tenant.pk).exists()
    builds.remove_unused()
    assert store().digests() == []


def test_a_changed_file_is_noticed(alice: Caller) -> None:
    version = built(alice.tenant, **SCIENCE)
    assert list(builds.problems()) == []
    (module,) = store().path(version.digest).rglob("tinymath.py")
    module.unlink()
    module.write_text("VERSION = 'evil'\n")
    ((found, problem),) = builds.problems()
    assert found == version
    assert "changed" in problem

"""Packages that are built from their source: by an administrator's leave, and only as wheels."""

from __future__ import annotations

from typing import Any

import pytest

from executions.capabilities.templates import builds
from executions.capabilities.templates.models import Template
from executions.capabilities.templates.names import store
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from providers.templates.lock import BUILT
from providers.values import ArtifactFile, ExecutionResult
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.package_index import PackageIndex, make_sdist, make_wheel
from tests.support.templates import URL, again, built, finished

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten", "sources")]

SOURCED: dict[str, Any] = {"python": ["sourced"], "build": ["Sourced"]}
WHEEL = "sourced-1.0-py3-none-any.whl"
FILES = {"sourced.py": "VALUE = 1\n", "evil.pth": "import evil\n"}


class Sources:
    """A sandbox that resolves to a source, and then leaves what a test wants of its build."""

    def __init__(self, liar: Liar, index: PackageIndex) -> None:
        self.liar, self.index = liar, index
        self.left: dict[str, bytes] = {WHEEL: make_wheel("sourced", files=FILES)}
        self.exit_code = 0
        liar.does("run", self._run)

    @property
    def jobs(self) -> list[Any]:
        return list(self.liar.module.jobs)

    def _run(self) -> ExecutionResult:
        if 'uv", *options' in self.jobs[-1].code:
            return self._answer(self.left, self.exit_code)
        lock = self.index.pylock("sourced-1.0.tar.gz").encode()
        return self._answer({"pylock.toml": lock, "yanked.json": b"{}"}, 0)

    def _answer(self, files: dict[str, bytes], exit_code: int) -> ExecutionResult:
        artifacts = [ArtifactFile(name, "text/plain", content) for name, content in files.items()]
        return ExecutionResult("", "", exit_code, 0.1, artifacts=artifacts)


@pytest.fixture
def sources(resolver: Liar, index: PackageIndex, settings: Any) -> Sources:
    settings.TEMPLATE_BUILDS_FROM_SOURCE = True
    index.add_file("sourced-1.0.tar.gz", make_sdist("sourced"))
    return Sources(resolver, index)


def test_without_leave_nothing_of_it_runs(alice: Caller, settings: Any, sources: Sources) -> None:
    settings.TEMPLATE_BUILDS_FROM_SOURCE = False
    version = built(alice.tenant, **SOURCED)
    assert version.state == "failed"
    assert "TEMPLATE_BUILDS_FROM_SOURCE=yes" in version.problem
    assert sources.jobs == []
    assert not Execution.objects.exists()


def test_a_source_that_the_declaration_does_not_name_is_refused(
    alice: Caller, sources: Sources
) -> None:
    version = built(alice.tenant, python=["sourced"])
    assert version.state == "failed"
    assert "or the package in build" in version.problem
    assert len(sources.jobs) == 1


def test_the_lock_has_the_hashes_of_the_source_and_of_the_wheel(
    alice: Caller, index: PackageIndex, sources: Sources
) -> None:
    version = built(alice.tenant, **SOURCED)
    assert (version.state, version.problem) == ("ready", "")
    (package,) = version.locked.packages
    assert package.url == f"{BUILT}{WHEEL}"
    assert package.source_hash == f"sha256:{index.hashes['sourced-1.0.tar.gz']}"
    assert package.source_url == f"{index.url}/files/sourced-1.0.tar.gz"
    # Both parts are executions of the tenant, and only the index is reached.
    rows = Execution.objects.filter(request_id=f"template:{version.pk}")
    assert {row.tenant_slug for row in rows} == {alice.tenant.slug}
    assert len(rows) == 2
    assert sources.liar.module.specs[-1].network is not None
    folder = store().path(version.digest)
    assert list(folder.rglob("sourced.py"))
    # What would run at every start is left out, as of any wheel.
    assert not list(folder.rglob("*.pth"))
    said = alice.client.get(f"{URL}/science/versions/1").json()["packages"][0]
    assert said["source"] == package.source_hash
    entry = LedgerEntry.objects.filter(kind="template_version").order_by("-sequence").first()
    assert entry is not None
    assert entry.stated["lock_digest"] == version.locked.digest
    (component,) = alice.client.get(f"{URL}/science/versions/1/sbom").json()["components"]
    (origin,) = component["externalReferences"]
    assert (origin["type"], origin["url"]) == ("source-distribution", package.source_url)


@pytest.mark.parametrize(
    ("left", "told"),
    [
        ({}, "left no wheel"),
        ({"other-1.0-py3-none-any.whl": make_wheel("other")}, "of another package or version"),
        ({"sourced-2.0-py3-none-any.whl": make_wheel("sourced")}, "of another package or version"),
        ({"folder/sourced-1.0-py3-none-any.whl": b""}, "is no wheel"),
        ({"sourced.whl": b""}, "is no wheel"),
        ({WHEEL: b"no archive"}, "damaged"),
        ({"sourced-1.0-cp27-none-win32.whl": make_wheel("sourced")}, "is not for Python"),
        ({WHEEL: make_wheel("sourced", files={"../../escaped.py": ""})}, "escaped"),
    ],
)
def test_what_is_no_wheel_of_the_package_is_refused(
    left: dict[str, bytes], told: str, alice: Caller, sources: Sources
) -> None:
    sources.left = left
    version = built(alice.tenant, **SOURCED)
    assert version.state == "failed"
    assert told in version.problem
    assert store().digests() == []


def test_a_build_that_fails_says_so(alice: Caller, sources: Sources) -> None:
    sources.exit_code = 1
    assert "sourced could not be built" in built(alice.tenant, **SOURCED).problem


def test_the_same_declaration_is_not_built_again_while_its_files_are_here(
    alice: Caller, sources: Sources
) -> None:
    first = built(alice.tenant, **SOURCED)
    ran = len(sources.jobs)
    second = builds.request_build(first.template, "test")
    assert (second.state, second.digest) == ("ready", first.digest)
    assert len(sources.jobs) == ran
    # On another machine the same source is built again, without another resolution.
    store().remove(first.digest)
    third = finished(builds.request_build(first.template, "test"))
    assert third.state == "ready", third.problem
    assert len(sources.jobs) == ran + 1
    assert third.locked == first.locked


def test_leave_that_was_taken_back_ends_further_builds(
    alice: Caller, settings: Any, sources: Sources
) -> None:
    first = built(alice.tenant, **SOURCED)
    settings.TEMPLATE_BUILDS_FROM_SOURCE = False
    assert again(Template.objects.get()).state == "failed"
    first.refresh_from_db()
    assert first.state == "ready"

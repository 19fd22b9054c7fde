"""Templates in tests: an index over a real socket, and a resolver that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executions.capabilities.templates import builds
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.tenants.keys import create_api_key
from executions.tenants.models import Tenant
from providers.base import ENVIRONMENT, FILES
from providers.services.settings_cache import forget_all
from providers.templates.declaration import Declaration
from providers.values import ArtifactFile
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.networks import listed
from tests.support.package_index import PackageIndex, package_index

URL = "/api/v1/templates"
SCOPES = "execute files read sessions templates"


@pytest.fixture
def index(settings: Any, tmp_path: Path, db: None) -> Iterator[PackageIndex]:
    """An index that the installation's list allows, and a place for templates of this test."""
    settings.DATA_DIR = tmp_path
    with package_index() as served:
        settings.PACKAGE_INDEX_URL = served.simple
        settings.NPM_REGISTRY_URL = served.url
        settings.NETWORK_ALLOWED_ADDRESSES = ["127.0.0.0/8"]
        listed(served.url.removeprefix("http://"))
        yield served
    forget_all()


@pytest.fixture
def resolver(liar: Liar, index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> Liar:
    """A provider that can do what templates need, and whose runs lock all files of the index."""
    capabilities = frozenset((FILES, ENVIRONMENT))
    monkeypatch.setattr(liar.module.Liar, "capabilities", capabilities)
    liar.does("holds_network", lambda: True)
    liar.does("holds_templates", lambda: True)
    resolves(liar, index)
    return liar


def resolves(liar: Liar, index: PackageIndex) -> None:
    """Have each run leave the lock of all files of the index, as they are now."""
    lock = index.pylock(*index.files).encode()
    files = {"pylock.toml": lock, "yanked.json": json.dumps(index.yanked).encode()}
    artifacts = [ArtifactFile(name, "text/plain", content) for name, content in files.items()]
    liar.answers(stdout="Resolved\n", artifacts=artifacts)


def builder(caller: Caller) -> Caller:
    """The same tenant with a key that may build templates."""
    return Caller(*create_api_key(caller.tenant, "builder", scopes=SCOPES))


def built(tenant: Tenant | None, name: str = "science", **declared: Any) -> TemplateVersion:
    """A version of a new template that is ready, or why it is not."""
    declared = declared or {"environment": {"COLOUR": "blue"}}
    version = builds.create(tenant, name, Declaration.parse(declared), "test")
    return finished(version)


def again(template: Template, **declared: Any) -> TemplateVersion:
    """The next version of a template."""
    declaration = Declaration.parse(declared) if declared else None
    return finished(builds.request_build(template, "test", declaration))


def finished(version: TemplateVersion) -> TemplateVersion:
    """The same once it was built here, as a worker does."""
    builds.build_one(version.pk)
    version.refresh_from_db()
    return version

"""Fixtures that every test may use."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from django.db import connection
from django.test import TransactionTestCase
from rest_framework.test import APIClient

from executions.kernel import background, presentation
from executions.ledger import entry
from executions.runs import heartbeat
from executions.tenants.keys import create_api_key
from executions.tenants.models import ApiKey, Tenant
from providers import admin_lists
from providers.local import service as local_service
from providers.runtime.launchers import images
from providers.services import probing, trial
from providers.services.settings_cache import forget_all
from sandbox_site import strangers
from tests.support import service_here
from tests.support.emptying import empty_database
from tests.support.required import require as require
from tests.support.site import MANAGE, kept_folder

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

TESTS = Path(__file__).parent

pytest_plugins = [
    "tests.support.file_scheduling",
    "tests.support.provider_fixtures",
    "tests.support.bound_updates",
    "tests.support.sandboxes",
    "tests.support.kept_guest",
    "tests.support.docker_engine",
    "tests.support.remote_providers",
    "tests.support.routing",
    "tests.support.sessions",
    "tests.support.lying_provider",
    "tests.support.servers",
    "tests.support.policies",
    "tests.support.networks",
    "tests.support.journals",
    "tests.support.postgres_server",
    "tests.support.bucket",
    "tests.support.streaming",
    "tests.support.e2b_door",
    "tests.support.kubernetes",
]

# What a test of each lane is found by, in this order: a folder, or a fixture that it uses. See
# CONTRIBUTING.md for what the lanes are for.
LANES: Mapping[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "faults": (("faults", "chaos"), frozenset({"own_servers", "postgres", "own_swift"})),
    "browser": (("admin/browser",), frozenset({"page"})),
    "containers": ((), frozenset({"engine", "private_engine"})),
    "kubernetes": ((), frozenset({"cluster"})),
    "sandbox": (
        (
            *("attacks", "docs", "clients", "site", "doors/codex", "doors/e2b", "doors/mcp"),
            *(f"providers/{name}" for name in ("contract", "guest", "launchers", "local")),
            *(f"providers/{name}" for name in ("network", "pool", "templates")),
        ),
        frozenset(
            {
                *("bubblewrap", "gvisor", "local", "own", "guests", "kept"),
                *("local_active", "shared_service", "streaming_site", "kept_here"),
            }
        ),
    ),
    "db": ((), frozenset({"db", "transactional_db"})),
    "unit": ((), frozenset()),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its lane, and leave out what is about another database.

    Lanes come in the order above: what takes longest begins first, so that no worker is left with
    it at the end.
    """
    left_out = [item for item in items if _is_of_another_database(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    order = {name: number for number, name in enumerate(LANES)}
    lanes = {item: _lane_of(item) for item in items}
    for item, lane in lanes.items():
        item.add_marker(lane)
        if item.get_closest_marker("only_on"):
            item.add_marker("database")
    # The tests of a module stay together, in its first test's place.
    place: dict[Path, int] = {}
    for item in items:
        place[item.path] = min(place.get(item.path, len(order)), order[lanes[item]])
    items.sort(key=lambda item: place[item.path])


def _lane_of(item: pytest.Item) -> str:
    folder = item.path.parent.relative_to(TESTS).as_posix()
    used = set(getattr(item, "fixturenames", ()))
    if item.get_closest_marker("django_db"):
        used.add("db")
    for lane, (folders, fixtures) in LANES.items():
        if folder in folders or used & fixtures:
            return lane
    return "unit"


def _is_of_another_database(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("only_on")
    return mark is not None and connection.vendor not in mark.args


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """What is saved or done behind an answer is done before the test's rows go."""
    assert background.wait_for_keyed_work(60)
    assert background.wait_until_idle(60)


@pytest.fixture(scope="session", autouse=True)
def _no_sync() -> Iterator[None]:
    """Images are not written out: that waits for all that the other tests write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_sync", lambda folder: None)
        yield


@pytest.fixture(scope="session")
def django_db_keepdb(django_db_modify_db_settings: None) -> bool:
    """Whether the tables are there: SQLite's file is a copy of one that the migrations made."""
    if connection.vendor != "sqlite":
        return False
    migrated = kept_folder("tables-of-tests", _migrate, TESTS / "settings.py")
    shutil.copyfile(migrated / "db.sqlite3", connection.settings_dict["TEST"]["NAME"])
    return True


def _migrate(folder: Path) -> None:
    database = {"DATABASE_URL": f"sqlite:///{folder / 'db.sqlite3'}"}
    environment = os.environ | database | {"DJANGO_SETTINGS_MODULE": "tests.settings"}
    command = [*MANAGE, "migrate", "--verbosity", "0"]
    subprocess.run(command, env=environment, cwd=TESTS.parent, check=True)


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> None:
    """Tests give a configuration the id 1, of which PostgreSQL's own count is not to know."""
    with django_db_blocker.unblock():
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("ALTER SEQUENCE providers_providerconfig_id_seq RESTART 1000")


@pytest.fixture(autouse=True, scope="session")
def _pages() -> None:
    """As in a web process, whatever a test asks for first: the URLs register the admin's pages."""
    import_module("sandbox_site.urls")


@pytest.fixture(autouse=True, scope="session")
def _services_here() -> Iterator[None]:
    """The pool service of the provider `local` is in this process, where a test can look into it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_service, "start", service_here.start_here)
        yield
    service_here.close_all()


@pytest.fixture(autouse=True, scope="session")
def _patient() -> Iterator[None]:
    """A busy machine has time for what a page or a pool service does in a moment elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_service, "STATS_SECONDS", 120.0)
        patch.setattr(admin_lists, "SECONDS", 60.0)
        patch.setattr(presentation, "PATIENCE_SECONDS", 60.0)
        patch.setattr(presentation._pool, "wall_seconds", 60.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def _emptied_quickly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", empty_database)
        yield


@pytest.fixture(autouse=True)
def _no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed try is told at once; that it is not otherwise has a test of its own."""
    monkeypatch.setattr(trial, "STEP_SECONDS", 0.001)


@pytest.fixture(autouse=True)
def lease(monkeypatch: pytest.MonkeyPatch) -> heartbeat.Heartbeat:
    """Each test is a process of its own. Its rows go with the test, so nobody keeps its lease."""
    keeper = heartbeat.Heartbeat()
    monkeypatch.setattr(keeper, "_start_thread", lambda: None)
    monkeypatch.setattr(heartbeat, "_heartbeat", keeper)
    return keeper


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    """Each test is a process of its own, which has looked up nothing and seen nobody yet."""
    forget_all()
    strangers.pages.forget()
    strangers.passwords.forget()
    entry._has_refused = False


@dataclass
class Caller:
    """Somebody with an API key, and a client that sends it."""

    api_key: ApiKey
    key_text: str

    @property
    def tenant(self) -> Tenant:
        return self.api_key.tenant

    @cached_property
    def client(self) -> APIClient:
        client = APIClient()
        client.credentials(HTTP_X_API_KEY=self.key_text)
        return client


@pytest.fixture(autouse=True)
def doubted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who would be probed: in the background of a test a probe runs only where it is the subject."""
    found: list[str] = []

    def note(provider_id: str) -> None:
        found.append(provider_id)
        probing._end(provider_id)

    monkeypatch.setattr(probing, "_start", note)
    return found


@pytest.fixture
def alice(db: None) -> Caller:
    """The owner of whatever a test is about."""
    tenant = Tenant.objects.create(slug="wonderland", name="Wonderland")
    return Caller(*create_api_key(tenant, "alice"))


@pytest.fixture
def bob(alice: Caller) -> Caller:
    """Alice's colleague: the same tenant, another key."""
    return Caller(*create_api_key(alice.tenant, "bob"))


@pytest.fixture
def charlie(db: None) -> Caller:
    """A stranger: another tenant."""
    tenant = Tenant.objects.create(slug="elsewhere", name="Elsewhere")
    return Caller(*create_api_key(tenant, "charlie"))


@pytest.fixture
def no_lookup_grows_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for a second would be looked up once more on a slow machine."""
    for name in (
        "providers.services.settings_cache.KEPT_SECONDS",
        "executions.runs.rights.CHECK_SECONDS",
        "executions.runs.admission.DISK_LOOKED_AT_SECONDS",
    ):
        monkeypatch.setattr(name, 3600)

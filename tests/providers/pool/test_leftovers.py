"""Every provider's leftovers are swept, whatever another one's package does in its sweep."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db.models.functions import Now

from executions.runs.models import Process
from providers import registry
from providers.base import SandboxProvider
from providers.manager import manager
from providers.remote import reclaim
from providers.remote.reclaim import process_tag
from providers.services import save_config
from providers.tasks import sweep_leftovers
from providers.values import SandboxSpec
from tests.support.agentrun_server import AgentRunServer
from tests.support.certificates import Authority
from tests.support.e2b_server import E2BServer, Sandbox
from tests.support.notebook import Notebook
from tests.support.provider_package import PROBE, Packages
from tests.support.remote_providers import e2b_config, open_aliyun, open_e2b

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    manager.close()
    registry.refresh()


def test_one_package_that_fails_to_sweep_stops_no_other(
    e2b_server: E2BServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    packages = Packages(tmp_path, monkeypatch)
    source = PROBE + "\n    def sweep(self):\n        raise SystemExit('the sweep went wrong')\n"
    packages.install("sweeping", {"probe": "sweeping_probe:Probe"}, {"sweeping_probe": source})
    save_config("probe", {"endpoint": "http://localhost:1", "token": "a-token"})
    save_config("e2b", e2b_config(e2b_server))
    # A process of this machine that has ended: that of nobody.
    host = process_tag().split("-")[0]
    e2b_server.sandboxes["left"] = Sandbox(
        Notebook(), "", "", {"cofferdam": f"cofferdam-{host}-4194304-1-left"}, 60, 0
    )
    with caplog.at_level(logging.ERROR, "providers"):
        assert sweep_leftovers() == 1
    assert e2b_server.sandboxes == {}
    assert "provider probe failed to be swept" in caplog.text
    assert "the sweep went wrong" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("service", ["e2b", "aliyun"])
def test_what_processes_of_other_hosts_have_is_left_until_they_are_known_to_have_ended(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: E2BServer | AgentRunServer
    provider: SandboxProvider
    if service == "e2b":
        server = E2BServer()
        provider = open_e2b(server)
    else:
        # Sandboxes are listed over HTTPS alone.
        authority = Authority()
        server = AgentRunServer(certificate=authority.issue(tmp_path).path)
        provider = open_aliyun(server, ca_certificates=authority.pem)
    opened = {}
    for host in ("a" * 12, "b" * 12, "c" * 12):
        with monkeypatch.context() as there:
            there.setattr(reclaim, "_host", lambda host=host: host)
            opened[host[0]] = provider.open(SandboxSpec(), "wonderland").ref, process_tag()
    dead, living = (
        Process.objects.create(instance="web", kind="web", pid=1, tag=opened[host][1])
        for host in "ab"
    )
    # Its lease was taken, and it has another: it lives. Of the third host nobody here knows.
    Process.objects.create(instance="web", kind="web", pid=1, tag=living.tag, ended_at=Now())
    assert provider.sweep() == 0
    Process.objects.filter(pk=dead.pk).update(ended_at=Now())
    assert provider.sweep() == 1
    assert set(server.sandboxes) == {opened["b"][0], opened["c"][0]}
    provider.close()
    server.close()

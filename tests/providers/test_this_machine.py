"""The provider's form lists how this machine can isolate, and what is missing for the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from django.contrib.auth.models import User
from django.test import Client

from providers.runtime.pool.cgroup import CgroupParent
from providers.runtime.service.docker_check import Docker, engine_runtimes
from providers.services import this_machine
from providers.services.this_machine import abilities
from tests.support.docker_engine import Containers

pytest_plugins = ["tests.support.docker_engine"]

ADD = "/admin/providers/providerconfig/add/?provider="


def test_what_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setattr(CgroupParent, "create", lambda *_: None)
    missing = {each.name: each.missing for each in abilities()}
    assert "apt-get install" in missing["gVisor, a new sandbox for every run"]
    assert "apt-get install" in missing["bubblewrap"]
    assert missing["Docker"] == "No Docker engine answers."
    monkeypatch.setattr(this_machine, "find_runsc", lambda: "/usr/bin/runsc")
    missing = {each.name: each.missing for each in abilities()}
    assert missing["gVisor, a new sandbox for every run"] == ""
    assert "Delegate=yes" in missing["gVisor, one kernel per tenant"]


def test_the_engine_is_asked_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own runsc is enough, and another program of this machine's does not help it."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(CgroupParent, "create", lambda *_: None)
    monkeypatch.setattr(this_machine, "find_docker", lambda: Docker.READY)
    monkeypatch.setattr(this_machine, "engine_runtimes", lambda: frozenset({"runc", "runsc"}))
    found = {each.name: each for each in abilities()}
    for name in ("gVisor, a new sandbox for every run", "gVisor, one kernel per tenant", "Docker"):
        assert found[name].missing == ""
    assert "runtime: runsc (gVisor)" in found["Docker"].about
    # Without the images their remedy is named, and not how to install a second runsc.
    monkeypatch.setattr(this_machine, "find_docker", lambda: Docker.WITHOUT_IMAGES)
    found = {each.name: each for each in abilities()}
    for name in ("gVisor, a new sandbox for every run", "gVisor, one kernel per tenant"):
        assert "build_images" in found[name].missing
    monkeypatch.setattr(this_machine, "find_docker", lambda: Docker.READY)
    monkeypatch.setattr(this_machine, "engine_runtimes", lambda: frozenset({"runc"}))
    found = {each.name: each for each in abilities()}
    assert "apt-get" in found["gVisor, a new sandbox for every run"].missing
    assert "runsc is missing" in found["Docker"].about
    monkeypatch.setattr(this_machine, "find_docker", lambda: Docker.FORBIDDEN)
    found = {each.name: each for each in abilities()}
    assert "no permission" in found["Docker"].missing


def test_the_runtimes_are_the_engines_own(under_runc: Containers) -> None:
    assert engine_runtimes() == frozenset(under_runc.client.info()["Runtimes"])


@pytest.mark.django_db
def test_a_page_does_not_look_again_each_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(this_machine, "abilities", lambda: looks.append(1) or [])
    monkeypatch.setattr(this_machine, "time", SimpleNamespace(monotonic=lambda: 6e9))
    client.force_login(User.objects.create_superuser("admin"))
    for _ in range(2):
        assert client.get(f"{ADD}local").status_code == 200
    assert looks == [1]


@pytest.mark.django_db
def test_only_what_runs_on_machines_of_ones_own_has_the_list(client: Client) -> None:
    client.force_login(User.objects.create_superuser("admin"))
    for provider, expected in (("local", True), ("self_managed", True), ("e2b", False)):
        page = client.get(f"{ADD}{provider}").content.decode()
        assert ("Available isolation" in page) is expected

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from shed_provider.provider import ADDRESS_VARIABLE, ShedProvider
from shed_provider.server import Machine, ShedServer

from providers.errors import SandboxError
from providers.values import Job, RunLimits, SandboxSpec


@pytest.fixture(scope="module")
def server() -> Iterator[ShedServer]:
    with ShedServer("the-token") as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def contract_provider(server: ShedServer) -> Iterator[ShedProvider]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLE, server.url)
        provider = ShedProvider()
        config = {"token": "the-token", "address": server.url}
        provider.initialize(ShedProvider.check_config(config))
        yield provider
        provider.close()


@pytest.fixture(autouse=True)
def nothing_is_left(server: ShedServer) -> Iterator[None]:
    yield
    assert server.machines == {}


def test_the_provider_keeps_its_promises(promise):
    promise()


@pytest.mark.parametrize("fault", ["stall", "trickle"])
def test_a_service_that_never_ends_its_answer(
    contract_provider: ShedProvider, server: ShedServer, fault: str
) -> None:
    server.fault = fault
    sandbox = contract_provider.open(SandboxSpec(), "owner")
    assert sandbox.run(Job("print(1)", timeout=1)).timed_out
    sandbox.close()


def test_an_answer_that_is_cut_off_may_have_run(
    contract_provider: ShedProvider, server: ShedServer
) -> None:
    server.fault = "cut"
    sandbox = contract_provider.open(SandboxSpec(), "owner")
    with pytest.raises(SandboxError) as caught:
        sandbox.run(Job("print(1)"))
    assert (caught.value.code, caught.value.started) == ("SB003", True)
    sandbox.close()


def test_output_is_cut_between_characters(contract_provider: ShedProvider) -> None:
    sandbox = contract_provider.open(SandboxSpec(), "owner")
    result = sandbox.run(Job("print('é' * 100)", limits=RunLimits(output_bytes=11)))
    assert (result.stdout, result.stdout_truncated) == ("é" * 5, True)
    sandbox.close()


def test_what_a_dead_process_left_is_ended(
    contract_provider: ShedProvider, server: ShedServer
) -> None:
    sandbox = contract_provider.open(SandboxSpec(), "owner")
    # The name of a process of this machine that has ended: that of nobody.
    host = server.machines[sandbox.ref].name.split("-")[1]
    server.machines["left"] = Machine(f"cofferdam-{host}-4194304-1-left")
    server.machines["somebody else's"] = Machine("backup")
    assert contract_provider.sweep() == 1
    assert set(server.machines) == {sandbox.ref, "somebody else's"}
    server.machines.pop("somebody else's").end()
    sandbox.close()

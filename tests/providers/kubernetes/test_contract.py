"""Pods keep the promises of every provider, and of every provider that keeps sandboxes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from providers.conformance import Check
from providers.contract import CHECKS, Probe, is_offered
from providers.self_managed.provider import SelfManagedProvider
from providers.values import SandboxSpec
from tests.providers.contract.verdicts import is_told_as_not_offered
from tests.support.kubernetes import Cluster
from tests.support.kubernetes_pods import IMAGE_FIELDS, over_kubernetes, prepared_namespace
from tests.support.pool_service import provider_of

CLASSES = ("runc", "gvisor")

# What a language other than Python differs in is the guest's, which Docker's containers have too.
# gVisor in a Pod starts slowly: what it differs in is tried.
CASES = [
    pytest.param(
        runtime_class,
        check,
        language,
        id=f"{check.name}-{language}-{runtime_class}",
        marks=[pytest.mark.slow] if language != "python" or runtime_class == "gvisor" else [],
    )
    for check in CHECKS  # KEPT_CHECKS are among them
    for language in check.codes
    for runtime_class in CLASSES
]


@pytest.fixture(scope="module")
def runc(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SelfManagedProvider]:
    yield from _opened(cluster, tmp_path_factory, "runc")


@pytest.fixture(scope="module")
def gvisor(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SelfManagedProvider]:
    cluster.runtime_class("gvisor", "runsc")
    yield from _opened(cluster, tmp_path_factory, "gvisor")


def _opened(
    cluster: Cluster, folders: pytest.TempPathFactory, runtime_class: str
) -> Iterator[SelfManagedProvider]:
    namespace = prepared_namespace(cluster)
    with (
        over_kubernetes(cluster, folders.mktemp("pool"), namespace=namespace) as pool,
        provider_of(
            pool.url,
            runtime=runtime_class,
            **IMAGE_FIELDS,
            queue_timeout=120,
        ) as provider,
    ):
        # With its settings the service opens the cluster anew.
        provider.open(SandboxSpec("python"), "contract").close()
        yield provider


@pytest.mark.parametrize(("runtime_class", "check", "language"), CASES)
def test_a_pod_keeps_the_promises_of_a_provider(
    request: pytest.FixtureRequest, runtime_class: str, check: Check, language: str
) -> None:
    provider = request.getfixturevalue(runtime_class)
    if not is_offered(provider, check, language):
        assert is_told_as_not_offered(provider, check, language)
        return
    check.verify(Probe(provider, language), check.codes[language])

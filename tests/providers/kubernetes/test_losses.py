"""What the cluster takes away is lost, and is never run twice; the pool goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from providers.errors import ProviderUnavailable, RateLimited, SandboxError
from providers.runtime.pool.sandbox import Sandbox
from providers.values import Event, ExecutionResult, Job
from tests.support.kubernetes import Cluster
from tests.support.kubernetes_pods import Pods, pods_of
from tests.support.waiting import wait_until

LONG = "import time\nprint('on', flush=True)\ntime.sleep(600)"


class Run:
    """A run that is under way, and has begun."""

    def __init__(self, pods: Pods, code: str = LONG) -> None:
        self.sandbox: Sandbox = pods.start()
        self._pods = pods
        self._has_begun = False
        self._result: Future[ExecutionResult] = pods.loop.submit(
            self.sandbox.run(Job(code, "python", 500), self._take)
        )
        wait_until(lambda: self._has_begun or self._result.done(), seconds=60)

    def _take(self, event: Event) -> None:
        self._has_begun = True

    @property
    def pod(self) -> str:
        return str(self.sandbox.guest.found["pod"])

    @property
    def node(self) -> str:
        (found,) = [pod for pod in self._pods.present() if pod["metadata"]["name"] == self.pod]
        return str(found["spec"]["nodeName"])

    def loss(self) -> SandboxError:
        """How it was lost: nothing is known of it but that it had begun."""
        with pytest.raises(ProviderUnavailable) as raised:
            self._result.result(120)
        assert raised.value.started
        self._pods.loop.call(self.sandbox.destroy())
        return raised.value


def delete(pods: Pods, run: Run) -> None:
    path = f"/api/v1/namespaces/{pods.settings.namespace}/pods/{run.pod}"
    pods.cluster.request("DELETE", path, {"gracePeriodSeconds": 0})


def drain(pods: Pods, run: Run) -> None:
    pods.cluster.drain(run.node)


@pytest.mark.parametrize("take_away", [delete, drain])
def test_a_run_whose_pod_is_taken_away_is_lost(
    pods: Pods, take_away: Callable[[Pods, Run], None]
) -> None:
    run = Run(pods)
    node = run.node
    try:
        take_away(pods, run)
        run.loss()
    finally:
        pods.cluster.cordon(node, is_closed=False)
    assert pods.run("print('on')").stdout == "on\n"


def test_a_run_on_a_node_that_is_lost_is_lost_and_others_go_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.add_node("doomed")
    for name in ("node-1", "node-2"):
        cluster.cordon(name)
    try:
        with pods_of(cluster, tmp_path) as pods:
            run = Run(pods)
            assert run.node == "doomed"
            for name in ("node-1", "node-2"):
                cluster.cordon(name, is_closed=False)
            cluster.lose_node("doomed")
            run.loss()
            assert pods.run("print('on')").stdout == "on\n"
    finally:
        for name in ("node-1", "node-2"):
            cluster.cordon(name, is_closed=False)
        cluster.remove_node("doomed")


def test_a_run_is_lost_with_the_api_server_and_the_pool_goes_on_after_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    with pods_of(cluster, tmp_path) as pods:
        run = Run(pods)
        lists = pods.launcher.counts["pod_lists"]
        cluster.stop_api()
        try:
            run.loss()
            with pytest.raises(ProviderUnavailable, match="API server does not answer"):
                pods.start()
        finally:
            cluster.start_api()
        wait_until(lambda: pods.launcher.counts["pod_lists"] > lists, seconds=90)
        assert pods.run("print('on')").stdout == "on\n"
        # What could not be removed without the API server is an orphan now.
        wait_until(lambda: pods.present() == [], seconds=90)


def test_a_store_that_stands_still_delays_a_start_and_loses_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    with pods_of(cluster, tmp_path) as pods:
        cluster.stop_etcd()
        try:
            starting = pods.loop.submit(_start(pods))
            assert not starting.done()
        finally:
            cluster.continue_etcd()
        sandbox = starting.result(120)
        assert pods.run_in(sandbox, "print('late')").stdout == "late\n"
        pods.loop.call(sandbox.destroy())


async def _start(pods: Pods) -> Sandbox:
    return await Sandbox.start(pods.launcher, pods.template())


def test_a_full_quota_is_full_and_not_broken(cluster: Cluster, tmp_path: Path) -> None:
    with pods_of(cluster, tmp_path) as pods:
        namespace = pods.settings.namespace
        quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
        cluster.request(
            "POST", quotas, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
        )
        wait_until(
            lambda: "hard" in cluster.request("GET", f"{quotas}/few").get("status", {}), seconds=60
        )
        first = pods.start()
        with pytest.raises(RateLimited, match="raise its ResourceQuota"):
            pods.start()
        assert pods.run_in(first, "print('on')").stdout == "on\n"
        pods.loop.call(first.destroy())

        def has_room() -> bool:
            used = cluster.request("GET", f"{quotas}/few")["status"]["used"]
            return bool(used["pods"] == "0")

        wait_until(has_room, seconds=60)
        assert pods.run("print('on')").stdout == "on\n"


def test_a_pod_that_waits_for_a_node_is_no_failure(cluster: Cluster, tmp_path: Path) -> None:
    with pods_of(cluster, tmp_path) as pods:
        nodes = ("node-1", "node-2")
        for name in nodes:
            cluster.cordon(name)
        try:
            starting = pods.loop.submit(_start(pods))

            def waits() -> bool:
                return any(
                    condition.get("reason") == "Unschedulable"
                    for pod in pods.present()
                    for condition in pod["status"].get("conditions") or ()
                )

            wait_until(waits, seconds=60)
            assert not starting.done()
        finally:
            for name in nodes:
                cluster.cordon(name, is_closed=False)
        sandbox = starting.result(120)
        assert pods.run_in(sandbox, "print('on')").stdout == "on\n"
        pods.loop.call(sandbox.destroy())

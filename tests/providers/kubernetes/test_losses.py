"""What the cluster takes away is lost, and is never run twice; the pool goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from providers.errors import (
    ConnectionFailed,
    CreationFailed,
    KeptSandboxLost,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.runtime.launchers.kubernetes.api import Api
from providers.runtime.pool.sandbox import Sandbox
from providers.sandbox import KeptSandbox
from providers.values import Event, ExecutionResult, Job, SandboxSpec
from tests.providers.kubernetes.conftest import NamedPool
from tests.support.cut_relay import relayed
from tests.support.kubernetes import Cluster
from tests.support.kubernetes_pods import (
    CLOSED_NETWORK,
    POD_SETTINGS,
    Pods,
    over_kubernetes,
    pods_of,
    pool_account,
    prepared_namespace,
)
from tests.support.pool_service import provider_of
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


def test_a_session_goes_on_after_the_api_server_was_gone(named_pool: NamedPool) -> None:
    sandbox = named_pool.keep()
    sandbox.run(Job("x = 41"))
    before = named_pool.pod_of(sandbox)["metadata"]["uid"]

    named_pool.cluster.stop_api()
    named_pool.cluster.start_api()

    wait_until(lambda: _goes_on(sandbox), seconds=90)
    assert named_pool.pod_of(sandbox)["metadata"]["uid"] == before


def test_a_cell_under_way_is_lost_with_the_api_server_and_its_session_goes_on(
    named_pool: NamedPool,
) -> None:
    sandbox = named_pool.keep()
    sandbox.run(Job("x = 41"))
    begun = threading.Event()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            sandbox.run(Job(LONG, timeout=300), lambda _: begun.set())
        except SandboxError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    named_pool.cluster.stop_api()
    thread.join(120)
    named_pool.cluster.start_api()

    assert [getattr(error, "started", None) for error in raised] == [True]

    wait_until(lambda: _goes_on(sandbox), seconds=90)


def test_connections_that_are_cut_lose_runs_and_no_sessions(
    cluster: Cluster, tmp_path: Path
) -> None:
    namespace = prepared_namespace(cluster)
    described = json.loads(pool_account(cluster, namespace).read_text())
    with relayed(cluster.port) as relay:
        described["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{relay.port}"
        kubeconfig = tmp_path / "relayed"
        kubeconfig.write_text(json.dumps(described))
        with (
            over_kubernetes(
                cluster, tmp_path, namespace=namespace, KUBECONFIG=str(kubeconfig)
            ) as pool,
            provider_of(pool.url, **POD_SETTINGS, queue_timeout=120) as provider,
        ):
            sandbox = provider.open(SandboxSpec(kept=True), "alice")
            assert isinstance(sandbox, KeptSandbox)
            sandbox.run(Job("x = 41"))
            for _ in range(3):
                relay.cut()
                wait_until(lambda: _goes_on(sandbox), seconds=90)
            assert sandbox.close()


def _goes_on(sandbox: KeptSandbox) -> bool:
    try:
        return sandbox.run(Job("print(x + 1)")).stdout == "42\n"
    except KeptSandboxLost:
        raise
    except (ConnectionFailed, ProviderUnavailable):
        return False  # to be tried again, as it says


def test_a_lease_that_cannot_be_renewed_is_over_for_its_holder_first(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then no other process has the name: none of them removes what the other has made."""
    owner = "providers.runtime.launchers.kubernetes.owner"
    monkeypatch.setattr(f"{owner}.LEASE_SECONDS", 5)
    monkeypatch.setattr(f"{owner}.RENEW_SECONDS", 0.2)
    with pods_of(cluster, tmp_path) as pods:
        cluster.stop_api()
        try:
            wait_until(lambda: not pods.launcher.is_holder, seconds=60)
            with pytest.raises(ProviderUnavailable, match="does not hold the Lease"):
                pods.start()
        finally:
            cluster.start_api()
        wait_until(lambda: pods.launcher.is_holder, seconds=90)
        assert pods.run("print('on')").stdout == "on\n"


def test_a_network_that_is_opened_stops_new_sandboxes(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.runtime.launchers.kubernetes.owner.REAP_SECONDS", 0.2)
    with pods_of(cluster, tmp_path) as pods:
        sandbox = pods.start()
        policies = (
            f"/apis/networking.k8s.io/v1/namespaces/{pods.settings.namespace}/networkpolicies"
        )
        cluster.request("DELETE", f"{policies}/sandboxes")

        def is_refused() -> bool:
            try:
                pods.loop.call(pods.start().destroy())
            except ProviderUnavailable as error:
                return "NetworkPolicy" in error.message
            return False

        wait_until(is_refused, seconds=60)
        # What runs, runs on.
        assert pods.run_in(sandbox, "print('on')").stdout == "on\n"
        pods.loop.call(sandbox.destroy())
        cluster.request("POST", policies, CLOSED_NETWORK)
        wait_until(lambda: not is_refused(), seconds=60)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hostNetwork": True}, "spec.hostNetwork"),
        ({"containers": "a side-car"}, "spec.containers"),
        ({"automountServiceAccountToken": True}, "spec.automountServiceAccountToken"),
    ],
)
def test_a_pod_that_admission_has_changed_is_not_used(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    named: str,
) -> None:
    """The webhook is imitated between the launcher and the API server."""
    with pods_of(cluster, tmp_path) as pods:
        call = Api.call

        async def changing(api: Api, method: str, path: str, body: Any = None, **how: Any) -> Any:
            if method == "POST" and path == api.pods:
                spec = {**body["spec"], **changed}
                if "containers" in changed:
                    side_car = {"name": "proxy", "image": "sandbox", "command": ["sleep", "1000"]}
                    spec["containers"] = [*body["spec"]["containers"], side_car]
                body = {**body, "spec": spec}
            return await call(api, method, path, body, **how)

        monkeypatch.setattr(Api, "call", changing)
        with pytest.raises(CreationFailed, match=named.replace(".", r"\.")):
            pods.start()
        wait_until(lambda: pods.present() == [], seconds=60)

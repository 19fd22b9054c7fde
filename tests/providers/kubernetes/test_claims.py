"""Sandboxes in Pods of agent-sandbox's warm pools, which are got by SandboxClaims.

agent-sandbox's CRDs are its own (`tests/support/agent_sandbox_crds`), and its controllers are those
of `tests.support.agent_sandbox_controllers`.
"""

from __future__ import annotations

import io
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import CommandError, call_command

from providers.conformance import Check
from providers.contract import CHECKS, Probe, is_offered
from providers.errors import CreationFailed, InvalidConfiguration, ProviderUnavailable, RateLimited
from providers.languages import OURS, language_of
from providers.runtime.launchers.kubernetes.manifest import (
    APP,
    APP_LABEL,
    GUARD_SECONDS,
    POOL_LABEL,
    TENANT_LABEL,
)
from providers.runtime.pool.hardening import RUNC, Hardening
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.service.settings import ServiceSettings
from providers.self_managed.provider import SelfManagedProvider
from providers.values import Command, ExecutionResult, Job
from tests.providers.contract.verdicts import is_told_as_not_offered
from tests.providers.kubernetes.conftest import NamedPool
from tests.support.agent_sandbox_cluster import EXTENSIONS, AgentSandboxCluster
from tests.support.kubernetes import require_cluster
from tests.support.kubernetes_pods import (
    POD_SETTINGS,
    RIGHTS,
    Pods,
    over_kubernetes,
    pods_of,
    pool_account,
    prepared_namespace,
)
from tests.support.pool_service import provider_of
from tests.support.processes import ROOT
from tests.support.required import missing, require
from tests.support.waiting import wait_until

GROUP = "extensions.agents.x-k8s.io"
# What deploy/kubernetes gives the pool for claims.
CLAIM_RIGHTS = next(yaml.safe_load_all((ROOT / "deploy/kubernetes/claims.yaml").read_text()))[
    "rules"
]
WARM_POOL = "agents-python"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def cluster() -> Iterator[AgentSandboxCluster]:
    """A cluster of this module's own, with agent-sandbox and one node."""
    require_cluster()
    running = AgentSandboxCluster(["node-1"])
    with running:
        yield running


def printed(*arguments: str) -> list[dict[str, Any]]:
    """What `manage.py kubernetes_template` prints."""
    output = io.StringIO()
    call_command("kubernetes_template", *arguments, stdout=output)
    return list(yaml.safe_load_all(output.getvalue()))


def warm_pool(
    cluster: AgentSandboxCluster,
    namespace: str,
    *,
    language: str = "python",
    runtime: str = "runc",
    replicas: int = 1,
    change: Change | None = None,
) -> None:
    """Create a warm pool for a language, as it is printed, or with a change of its template."""
    options = {
        "--image": "sandbox",
        "--language": language,
        "--runtime": runtime,
        "--python": "/usr/bin/python3",
        "--interpreter": interpreter_of(language),
        "--replicas": str(replicas),
    }
    words = (word for option in options.items() for word in option)
    template, pool = printed(f"agents-{language}", *words)
    if change:
        change(template["spec"])
    cluster.apply(namespace, template)
    cluster.apply(namespace, pool)


def interpreter_of(language: str) -> str:
    """The path of a language's interpreter in a Pod, which sees this machine's programs."""
    known = language_of(language)
    assert known
    path = Hardening.of(RUNC).settings["environment"]["PATH"]
    found = [shutil.which(name, path=path) for name in known.interpreters]
    return next(filter(None, found), None) or missing(f"{language} is not installed")


@pytest.fixture
def namespace(cluster: AgentSandboxCluster) -> str:
    return prepared_namespace(cluster)


@pytest.fixture(scope="module")
def claimed(
    cluster: AgentSandboxCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pods]:
    """Sandboxes of a launcher in this process, from a warm pool with one replica."""
    namespace = prepared_namespace(cluster)
    warm_pool(cluster, namespace)
    with from_warm_pool(cluster, tmp_path_factory.mktemp("claimed"), namespace) as opened:
        yield opened


def from_warm_pool(
    cluster: AgentSandboxCluster, folder: Path, namespace: str, **settings: Any
) -> Any:
    settings.setdefault("claims", {"": WARM_POOL})
    return pods_of(cluster, folder, namespace=namespace, **settings)


def claims_of(pods: Pods) -> list[dict[str, Any]]:
    assert isinstance(pods.cluster, AgentSandboxCluster)
    return pods.cluster.claims(pods.settings.namespace)


def end(pods: Pods, sandbox: Sandbox) -> None:
    pods.loop.call(sandbox.destroy())


def pod_of(pods: Pods, sandbox: Sandbox) -> dict[str, Any]:
    (found,) = [
        pod for pod in pods.present() if pod["metadata"]["name"] == sandbox.guest.found["pod"]
    ]
    return found


# Runs.


def test_a_run_is_in_a_pod_of_the_warm_pool_which_ends_with_its_claim(claimed: Pods) -> None:
    def warm() -> list[str]:
        return [
            pod["metadata"]["name"]
            for pod in claimed.present()
            if POOL_LABEL not in pod["metadata"]["labels"] and pod["status"]["phase"] == "Running"
        ]

    wait_until(lambda: len(warm()) == 1, seconds=60)
    (name,) = warm()

    sandbox = claimed.start()
    assert sandbox.guest.found["pod"] == name
    assert claimed.run_in(sandbox, "print(6 * 7)").stdout == "42\n"
    end(claimed, sandbox)

    assert claims_of(claimed) == []
    assert name not in [pod["metadata"]["name"] for pod in claimed.present()]
    wait_until(lambda: len(warm()) == 1, seconds=60)


def test_a_claim_says_whose_it_is_and_when_it_ends(claimed: Pods) -> None:
    sandbox = claimed.start()
    (claim,) = claims_of(claimed)
    pod = pod_of(claimed, sandbox)
    end(claimed, sandbox)

    pool = claimed.settings.pool
    assert claim["metadata"]["labels"] == {APP_LABEL: APP, POOL_LABEL: pool}
    (owner,) = claim["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Lease", f"cofferdam-{pool}")
    assert claim["spec"]["warmPoolRef"] == {"name": WARM_POOL}
    lifecycle = claim["spec"]["lifecycle"]
    assert lifecycle["shutdownPolicy"] == "Delete"
    left = datetime.fromisoformat(lifecycle["shutdownTime"]) - datetime.now(UTC)
    assert timedelta() < left <= timedelta(seconds=GUARD_SECONDS)
    assert pod["metadata"]["labels"][POOL_LABEL] == pool


def test_the_owner_of_a_run_is_noted_at_its_pod(claimed: Pods) -> None:
    sandbox = claimed.start()
    claimed.loop.call(_note_owner(sandbox))
    wait_until(lambda: TENANT_LABEL in pod_of(claimed, sandbox)["metadata"]["labels"], seconds=60)
    end(claimed, sandbox)


async def _note_owner(sandbox: Sandbox) -> None:
    sandbox.guest.note_owner("alice")


def test_an_empty_warm_pool_gives_a_new_pod(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path
) -> None:
    warm_pool(cluster, namespace, replicas=0)
    with from_warm_pool(cluster, tmp_path, namespace) as pods:
        assert pods.run("print(6 * 7)").stdout == "42\n"


def test_a_template_without_a_warm_pool_gets_a_plain_pod(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path
) -> None:
    warm_pool(cluster, namespace, replicas=0)
    claims = {"bash": WARM_POOL}
    with from_warm_pool(cluster, tmp_path, namespace, claims=claims) as pods:
        sandbox = pods.start()
        assert claims_of(pods) == []
        assert pods.run_in(sandbox, "print(6 * 7)").stdout == "42\n"
        end(pods, sandbox)


OTHERS = {"nodejs": "console.log(6 * 7)", "bash": "echo $((6 * 7))"}


@pytest.mark.parametrize(("language", "code"), OTHERS.items(), ids=OTHERS.keys())
def test_every_language_has_a_warm_pool_of_its_own(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path, language: str, code: str
) -> None:
    warm_pool(cluster, namespace, language=language, replicas=0)
    claims = {language: f"agents-{language}"}
    with from_warm_pool(cluster, tmp_path, namespace, claims=claims) as pods:
        sandbox = pods.start(language)
        assert len(claims_of(pods)) == 1
        assert pods.run_in(sandbox, code).stdout == "42\n"
        end(pods, sandbox)


@pytest.fixture
def gvisor_class(cluster: AgentSandboxCluster) -> Iterator[None]:
    """A RuntimeClass of gVisor's, which launchers without a choice of their own would take."""
    require("runsc")
    cluster.runtime_class("gvisor", "runsc")
    yield
    cluster.request("DELETE", "/apis/node.k8s.io/v1/runtimeclasses/gvisor")


@pytest.mark.usefixtures("gvisor_class")
def test_the_pods_of_a_warm_pool_are_in_gvisor_where_its_template_says_so(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path
) -> None:
    warm_pool(cluster, namespace, runtime="gvisor", replicas=0)
    with from_warm_pool(cluster, tmp_path, namespace, runtime="gvisor") as pods:
        code = "import os; print(os.getuid(), os.uname().release)"
        result = pods.run(code)
        assert result.metadata["runtime"] == "gvisor"
        assert result.stdout.startswith("65534 4.")


# What the cluster has no room for.


def test_a_claim_waits_for_a_node(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path
) -> None:
    def choose_node(spec: dict[str, Any]) -> None:
        spec["podTemplate"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "late"}

    warm_pool(cluster, namespace, replicas=0, change=choose_node)
    with from_warm_pool(cluster, tmp_path, namespace) as pods:
        starting = pods.loop.submit(_start(pods))

        def waits() -> bool:
            return any(
                condition.get("reason") == "Unschedulable"
                for pod in pods.present()
                for condition in pod["status"].get("conditions") or ()
            )

        wait_until(waits, seconds=60)
        assert not starting.done()
        cluster.add_node("late")
        try:
            sandbox = starting.result(120)
            assert pods.run_in(sandbox, "print('on')").stdout == "on\n"
            end(pods, sandbox)
        finally:
            cluster.remove_node("late")


def test_a_claim_waits_for_agent_sandbox(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path
) -> None:
    warm_pool(cluster, namespace, replicas=0)
    with from_warm_pool(cluster, tmp_path, namespace) as pods:
        cluster.stop_agent_sandbox()
        try:
            starting = pods.loop.submit(_start(pods))
            wait_until(lambda: len(claims_of(pods)) == 1, seconds=60)
            assert not starting.done()
        finally:
            cluster.start_agent_sandbox()
        sandbox = starting.result(120)
        assert pods.run_in(sandbox, "print('on')").stdout == "on\n"
        end(pods, sandbox)


def test_a_start_that_is_given_up_leaves_no_claim(
    cluster: AgentSandboxCluster,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def choose_node(spec: dict[str, Any]) -> None:
        spec["podTemplate"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "none"}

    monkeypatch.setattr("providers.runtime.launchers.kubernetes.claims.PENDING_SECONDS", 0.5)
    warm_pool(cluster, namespace, replicas=0, change=choose_node)
    with from_warm_pool(cluster, tmp_path, namespace) as pods:
        with pytest.raises(RateLimited, match="got no Pod of 'agents-python' in time"):
            pods.start()
        wait_until(lambda: claims_of(pods) == [] and pods.present() == [], seconds=60)


def test_an_image_that_cannot_be_used_is_named(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path
) -> None:
    """The node says so at the Pod: the claim only says that it is not ready."""
    warm_pool(
        cluster,
        namespace,
        replicas=0,
        change=_security(runAsUser=0, runAsGroup=0, runAsNonRoot=True),
    )
    with (
        from_warm_pool(cluster, tmp_path, namespace) as pods,
        pytest.raises(CreationFailed, match="CreateContainerConfigError"),
    ):
        pods.start()


async def _start(pods: Pods) -> Sandbox:
    return await Sandbox.start(pods.launcher, pods.template())


@pytest.mark.parametrize("counted", ["pods", f"count/sandboxclaims.{GROUP}"])
def test_a_full_quota_is_full_and_not_broken(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path, counted: str
) -> None:
    warm_pool(cluster, namespace, replicas=0)
    with from_warm_pool(cluster, tmp_path, namespace) as pods:
        quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
        cluster.request(
            "POST", quotas, {"metadata": {"name": "few"}, "spec": {"hard": {counted: "0"}}}
        )
        wait_until(
            lambda: "used" in cluster.request("GET", f"{quotas}/few").get("status", {}), seconds=60
        )
        with pytest.raises(RateLimited, match="raise its ResourceQuota"):
            pods.start()
        wait_until(lambda: claims_of(pods) == [], seconds=60)

        cluster.request("DELETE", f"{quotas}/few")
        assert pods.run("print('on')").stdout == "on\n"


# A Pod that is not what the launcher needs.


def _pod_spec(**fields: Any) -> Change:
    return lambda spec: spec["podTemplate"]["spec"].update(fields)


def _container(**fields: Any) -> Change:
    return lambda spec: spec["podTemplate"]["spec"]["containers"][0].update(fields)


def _security(**fields: Any) -> Change:
    return lambda spec: spec["podTemplate"]["spec"]["containers"][0]["securityContext"].update(
        fields
    )


def _labels(**labels: str) -> Change:
    return lambda spec: spec["podTemplate"]["metadata"].update(labels=labels)


def _on_disk(spec: dict[str, Any]) -> None:
    del spec["podTemplate"]["spec"]["volumes"][0]["emptyDir"]["medium"]


def _other_limits(spec: dict[str, Any]) -> None:
    command = spec["podTemplate"]["spec"]["containers"][0]["command"]
    command[-1] = command[-1].replace('"processes":64', '"processes":640')


def _second_container(spec: dict[str, Any]) -> None:
    spec["podTemplate"]["spec"]["containers"].append(
        {"name": "other", "image": "any", "command": ["sleep", "1000"]}
    )


def _variable(spec: dict[str, Any]) -> None:
    spec["podTemplate"]["spec"]["containers"][0]["env"].append({"name": "A", "value": "b"})


CONTAINER = "spec.containers[0]"
DIFFERENCES: dict[str, tuple[Change, list[str]]] = {
    "the machine's network": (_pod_spec(hostNetwork=True), ["spec.hostNetwork"]),
    # The token is a volume of the Pod.
    "a service account's token": (
        _pod_spec(automountServiceAccountToken=True),
        ["spec.automountServiceAccountToken", "spec.volumes"],
    ),
    "a second container": (_second_container, ["spec.containers"]),
    "a workspace on disk": (_on_disk, ["spec.volumes"]),
    "root": (
        _security(runAsUser=0, runAsGroup=0, runAsNonRoot=False),
        [
            f"{CONTAINER}.securityContext.{name}"
            for name in ("runAsGroup", "runAsNonRoot", "runAsUser")
        ],
    ),
    "a capability": (
        _security(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
        [f"{CONTAINER}.securityContext.capabilities"],
    ),
    "other limits": (_other_limits, [f"{CONTAINER}.command.limits"]),
    "another image": (_container(image="other"), [f"{CONTAINER}.image"]),
    "less memory": (
        _container(resources={"limits": {"cpu": "1", "memory": "64Mi"}}),
        [f"{CONTAINER}.resources"],
    ),
    "an input for one connection": (_container(stdinOnce=True), [f"{CONTAINER}.stdinOnce"]),
    "a variable": (_variable, [f"{CONTAINER}.env"]),
    "no label": (_labels(app="other"), [f"metadata.labels.{APP_LABEL}"]),
    "the label of a Pod that has had a run": (
        _labels(**{APP_LABEL: APP, TENANT_LABEL: "alice"}),
        [f"metadata.labels.{TENANT_LABEL}"],
    ),
}


@pytest.mark.parametrize(("change", "fields"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_a_pod_that_differs_is_refused_by_the_names_of_its_fields(
    cluster: AgentSandboxCluster,
    namespace: str,
    tmp_path: Path,
    change: Change,
    fields: list[str],
) -> None:
    warm_pool(cluster, namespace, replicas=0, change=change)
    with from_warm_pool(cluster, tmp_path, namespace) as pods:
        with pytest.raises(ProviderUnavailable) as raised:
            pods.start()
        assert raised.value.field == "kubernetes_claims"
        assert f"These fields differ: {', '.join(fields)}. " in raised.value.message
        wait_until(lambda: claims_of(pods) == [], seconds=60)


def test_a_user_of_its_own_choice_and_sizes_in_other_units_are_no_difference(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path
) -> None:
    def change(spec: dict[str, Any]) -> None:
        _security(runAsUser=4242, runAsGroup=4243)(spec)
        resources = spec["podTemplate"]["spec"]["containers"][0]["resources"]
        for each in resources.values():
            each["memory"] = f"{int(each['memory']) >> 20}Mi"

    warm_pool(cluster, namespace, replicas=0, change=change)
    with from_warm_pool(cluster, tmp_path, namespace) as pods:
        code = "import os; print(os.getuid(), os.getgid())"
        assert pods.run(code).stdout == "4242 4243\n"


# Preparation.


def test_a_warm_pool_that_is_not_there_is_named(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(ProviderUnavailable, match=f"no sandboxwarmpools '{WARM_POOL}'") as raised,
        from_warm_pool(cluster, tmp_path, namespace),
    ):
        pass
    assert raised.value.field == "kubernetes_claims"
    assert "manage.py kubernetes_template" in raised.value.message


def test_a_warm_pool_that_vanishes_is_named_at_the_start(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path
) -> None:
    warm_pool(cluster, namespace, replicas=0)
    with from_warm_pool(cluster, tmp_path, namespace) as pods:
        pools = f"{EXTENSIONS}/namespaces/{namespace}/sandboxwarmpools"
        cluster.request("DELETE", f"{pools}/{WARM_POOL}")
        with pytest.raises(ProviderUnavailable, match="WarmPoolNotFound"):
            pods.start()


@pytest.mark.parametrize("policy", [None, {"egress": [{}]}])
def test_a_template_that_opens_the_network_is_refused(
    cluster: AgentSandboxCluster, namespace: str, tmp_path: Path, policy: dict[str, Any] | None
) -> None:
    def change(spec: dict[str, Any]) -> None:
        del spec["networkPolicy"]
        if policy:
            spec["networkPolicy"] = policy

    warm_pool(cluster, namespace, replicas=0, change=change)
    with (
        pytest.raises(ProviderUnavailable, match="lets its sandboxes use the network"),
        from_warm_pool(cluster, tmp_path, namespace),
    ):
        pass


def test_rights_to_claims_that_are_missing_are_named(
    cluster: AgentSandboxCluster, namespace: str
) -> None:
    with pytest.raises(
        ProviderUnavailable, match="sandboxclaims: get, list, watch, create, delete"
    ):
        Pods(
            cluster,
            pool_account(cluster, namespace),
            namespace=namespace,
            claims={"": WARM_POOL},
        )


@pytest.mark.parametrize("text", ["python=", "=agents", "Agents", "python=a python=b", "a b"])
def test_a_setting_that_names_no_warm_pool_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        ServiceSettings.from_config({"kubernetes_claims": text})
    assert raised.value.field == "kubernetes_claims"


def test_the_setting_names_warm_pools_by_template_or_one_for_all() -> None:
    def read(text: str) -> object:
        return ServiceSettings.from_config({"kubernetes_claims": text}).kubernetes_claims

    assert read("python=a, bash=b") == {"python": "a", "bash": "b"}
    assert read("agents") == {"": "agents"}
    assert read("") == {}


# Losses.


class Run:
    """A run that is under way, and has begun."""

    def __init__(self, pods: Pods) -> None:
        self.sandbox = pods.start()
        self._pods = pods
        self._has_begun = False
        code = "import time\nprint('on', flush=True)\ntime.sleep(600)"
        self._result: Future[ExecutionResult] = pods.loop.submit(
            self.sandbox.run(Job(code, "python", 500), lambda _: self._begin())
        )
        wait_until(lambda: self._has_begun or self._result.done(), seconds=60)

    def _begin(self) -> None:
        self._has_begun = True

    def require_loss(self) -> None:
        with pytest.raises(ProviderUnavailable) as raised:
            self._result.result(120)
        assert raised.value.started
        end(self._pods, self.sandbox)


def delete_claim(pods: Pods, run: Run) -> None:
    (claim,) = claims_of(pods)
    claims = f"{EXTENSIONS}/namespaces/{pods.settings.namespace}/sandboxclaims"
    pods.cluster.request("DELETE", f"{claims}/{claim['metadata']['name']}")


def expire_claim(pods: Pods, run: Run) -> None:
    (claim,) = claims_of(pods)
    claims = f"{EXTENSIONS}/namespaces/{pods.settings.namespace}/sandboxclaims"
    pods.cluster.request(
        "PATCH",
        f"{claims}/{claim['metadata']['name']}",
        {"spec": {"lifecycle": {"shutdownTime": "2026-01-01T00:00:00Z"}}},
        "application/merge-patch+json",
    )


def delete_sandbox(pods: Pods, run: Run) -> None:
    sandboxes = f"/apis/agents.x-k8s.io/v1beta1/namespaces/{pods.settings.namespace}/sandboxes"
    pods.cluster.request("DELETE", f"{sandboxes}/{run.sandbox.guest.found['pod']}")


def evict_pod(pods: Pods, run: Run) -> None:
    """The Sandbox has another Pod of the same name after that."""
    name = run.sandbox.guest.found["pod"]
    pods.cluster.request(
        "POST",
        f"/api/v1/namespaces/{pods.settings.namespace}/pods/{name}/eviction",
        {
            "apiVersion": "policy/v1beta1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": pods.settings.namespace},
        },
    )


@pytest.mark.parametrize("take_away", [delete_claim, expire_claim, delete_sandbox, evict_pod])
def test_a_run_whose_pod_is_taken_away_is_lost_and_not_run_twice(
    claimed: Pods, take_away: Callable[[Pods, Run], None]
) -> None:
    run = Run(claimed)
    name = run.sandbox.guest.found["pod"]

    take_away(claimed, run)

    run.require_loss()
    wait_until(lambda: claims_of(claimed) == [], seconds=60)
    wait_until(
        lambda: name not in [pod["metadata"]["name"] for pod in claimed.present()], seconds=60
    )
    assert claimed.run("print('on')").stdout == "on\n"


# Orphans.


@pytest.mark.parametrize("has_claims", [True, False])
def test_a_claim_of_a_pool_that_is_gone_is_removed_by_another(
    cluster: AgentSandboxCluster,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_claims: bool,
) -> None:
    """Whether that one has claims or not. A Pod that waits in the warm pool is none of a pool's."""
    monkeypatch.setattr("providers.runtime.launchers.kubernetes.owner.ABSENT_SECONDS", -1.0)
    warm_pool(cluster, namespace)

    def has_warm_pod() -> bool:
        status = cluster.warm_pool(namespace, WARM_POOL).get("status", {})
        return bool(status.get("readyReplicas") == 1)

    wait_until(has_warm_pod, seconds=60)
    for name, pool in (("bound", WARM_POOL), ("without-a-pod", "none")):
        metadata = {"name": name, "labels": {APP_LABEL: APP, POOL_LABEL: "gone"}}
        claim = {
            "apiVersion": f"{GROUP}/v1beta1",
            "kind": "SandboxClaim",
            "metadata": metadata,
            "spec": {"warmPoolRef": {"name": pool}},
        }
        cluster.apply(namespace, claim)

    def bound() -> list[str]:
        found = cluster.claims(namespace)
        return [
            each["status"]["sandbox"]["name"] for each in found if each["status"].get("sandbox")
        ]

    wait_until(lambda: all("status" in each for each in cluster.claims(namespace)), seconds=60)
    wait_until(lambda: len(bound()) == 1 and has_warm_pod(), seconds=60)
    (taken,) = bound()
    claims = {"": WARM_POOL} if has_claims else {}
    with from_warm_pool(cluster, tmp_path, namespace, claims=claims) as pods:
        assert cluster.claims(namespace) == []
        wait_until(
            lambda: taken not in [pod["metadata"]["name"] for pod in pods.present()], seconds=60
        )
        (waiting,) = pods.present()
        assert POOL_LABEL not in waiting["metadata"]["labels"]
        assert "deletionTimestamp" not in waiting["metadata"]


# The pool service.


@pytest.fixture
def named_pool(cluster: AgentSandboxCluster, namespace: str, tmp_path: Path) -> Iterator[NamedPool]:
    warm_pool(cluster, namespace)
    pool_account(cluster, namespace, [*RIGHTS, *CLAIM_RIGHTS])
    opened = NamedPool(cluster, tmp_path, namespace, kubernetes_claims=f"python={WARM_POOL}")
    with opened.held:
        yield opened


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_session_is_found_again_and_the_claims_of_warm_pods_are_removed(
    cluster: AgentSandboxCluster, named_pool: NamedPool, number: signal.Signals
) -> None:
    sandbox = named_pool.keep()
    sandbox.run(Job("x = 41"))
    sandbox.files.write("kept.txt", [b"content"])
    sandbox.processes.start(Command(shell="sleep 1000"))
    named_pool.pool.wait_for(lambda stats: stats["templates"]["python"]["idle"] >= 1)
    kept = named_pool.pod_of(sandbox)["metadata"]
    claims = {each["metadata"]["uid"]: each for each in cluster.claims(named_pool.namespace)}
    (own,) = [
        uid for uid, each in claims.items() if each["status"]["sandbox"]["name"] == kept["name"]
    ]
    assert len(claims) > 1

    named_pool.stop(number)
    named_pool.start()

    assert sandbox.run(Job("print(x + 1)")).stdout == "42\n"
    assert b"".join(sandbox.files.read("kept.txt")) == b"content"
    assert len(sandbox.processes.list()) == 1
    assert named_pool.pod_of(sandbox)["metadata"]["uid"] == kept["uid"]
    uids = {each["metadata"]["uid"] for each in cluster.claims(named_pool.namespace)}
    assert own in uids
    wait_until(
        lambda: (
            {each["metadata"]["uid"] for each in cluster.claims(named_pool.namespace)}
            & claims.keys()
            == {own}
        ),
        seconds=60,
    )
    assert sandbox.close()
    wait_until(
        lambda: (
            own not in [each["metadata"]["uid"] for each in cluster.claims(named_pool.namespace)]
        ),
        seconds=60,
    )


@pytest.fixture(scope="module")
def provider(
    cluster: AgentSandboxCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SelfManagedProvider]:
    namespace = prepared_namespace(cluster)
    warm_pool(cluster, namespace, replicas=2)
    pool_account(cluster, namespace, [*RIGHTS, *CLAIM_RIGHTS])
    with (
        over_kubernetes(cluster, tmp_path_factory.mktemp("pool"), namespace=namespace) as pool,
        provider_of(
            pool.url,
            **POD_SETTINGS,
            kubernetes_claims=f"python={WARM_POOL}",
            queue_timeout=120,
        ) as opened,
    ):
        yield opened


@pytest.mark.parametrize(
    "check", [each for each in CHECKS if "python" in each.codes], ids=lambda check: check.name
)
def test_a_claimed_pod_keeps_the_promises_of_a_provider(
    provider: SelfManagedProvider, check: Check
) -> None:
    if not is_offered(provider, check, "python"):
        assert is_told_as_not_offered(provider, check, "python")
        return
    check.verify(Probe(provider, "python"), check.codes["python"])


# The command.


@pytest.mark.usefixtures("gvisor_class")
@pytest.mark.parametrize("language", OURS)
@pytest.mark.parametrize("runtime", ["gvisor", "runc"])
def test_the_api_server_takes_what_kubernetes_template_prints(
    cluster: AgentSandboxCluster, namespace: str, language: str, runtime: str
) -> None:
    """The Pod of a template too, which agent-sandbox's CRD does not check here."""
    template, pool = printed(
        "agents", "--image", "any", "--language", language, "--runtime", runtime, "--memory", "512m"
    )
    assert cluster.apply(namespace, template)["spec"]["networkPolicy"] == {}
    assert cluster.apply(namespace, pool)["spec"]["replicas"] == 2
    pod = {"metadata": {"name": "one"}, "spec": template["spec"]["podTemplate"]["spec"]}
    made = cluster.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
    assert made["spec"].get("runtimeClassName") == ("gvisor" if runtime == "gvisor" else None)


def test_kubernetes_template_refuses_a_size_that_is_none() -> None:
    with pytest.raises(CommandError, match="--memory"):
        printed("agents", "--image", "any", "--memory", "much")

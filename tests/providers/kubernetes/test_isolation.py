"""A program in a Pod has nothing of the cluster, and no more rights than in a container of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.kubernetes import Cluster
from tests.support.kubernetes_pods import Pods, pods_of
from tests.support.waiting import wait_until

LOOK = """
import json, os, socket
status = dict(
    line.split(":", 1) for line in open("/proc/self/status").read().splitlines() if ":" in line
)
def may_write(path):
    try:
        open(path + "/probe", "w").close()
        return True
    except OSError:
        return False
def reaches(address):
    try:
        socket.create_connection(address, 3).close()
        return True
    except OSError:
        return False
print(json.dumps({
    "uid": os.getuid(), "groups": os.getgroups(),
    "capabilities": [status[name].strip() for name in ("CapPrm", "CapEff", "CapBnd")],
    "no_new_privileges": status.get("NoNewPrivs", "").strip(), "seccomp": status.get("Seccomp", "").strip(),
    "token": os.path.exists("/var/run/secrets/kubernetes.io/serviceaccount"),
    "variables": sorted(name for name in os.environ if "KUBERNETES" in name or "SERVICE" in name),
    "hostname": socket.gethostname(),
    "written": [path for path in ("/", "/etc", "/usr", "/var", "/workspace", "/tmp", "/dev/shm")
                if may_write(path)],
    "reaches": [address for address in ADDRESSES if reaches(tuple(address))],
    "interfaces": [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line],
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
}))
"""


@pytest.fixture(scope="module")
def gvisor_pods(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    cluster.runtime_class("gvisor", "runsc")
    with pods_of(cluster, tmp_path_factory.mktemp("gvisor"), runtime="gvisor") as opened:
        yield opened


def look(pods: Pods) -> dict[str, Any]:
    api = pods.cluster.url.rpartition("/")[2].split(":")
    addresses = [[api[0], int(api[1])], ["10.0.0.1", 443], ["169.254.169.254", 80]]
    result = pods.run(f"ADDRESSES = {addresses!r}\n{LOOK}")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_program_has_no_rights_and_nothing_of_the_cluster(pods: Pods) -> None:
    seen = look(pods)
    assert seen["capabilities"] == ["0000000000000000"] * 3
    assert seen["no_new_privileges"] == "1"
    assert seen["seccomp"] == "2"
    assert seen["uid"] >= 1_900_000_000
    assert (seen["token"], seen["variables"], seen["hostname"]) == (False, [], "sandbox")
    assert seen["written"] == ["/workspace", "/tmp", "/dev/shm"]
    assert (seen["reaches"], seen["interfaces"]) == ([], ["lo"])
    assert 1 in seen["processes"]


def test_a_program_under_gvisor_has_no_rights_and_nothing_of_the_cluster(gvisor_pods: Pods) -> None:
    assert gvisor_pods.launcher.runtime == "gvisor"
    seen = look(gvisor_pods)
    assert seen["capabilities"][:2] == ["0000000000000000"] * 2
    assert seen["uid"] == 65534
    assert (seen["token"], seen["variables"]) == (False, [])
    assert seen["written"] == ["/workspace", "/tmp", "/dev/shm"]
    assert seen["reaches"] == []


def test_two_pods_are_of_two_users(pods: Pods) -> None:
    first, second = look(pods), look(pods)
    assert first["uid"] != second["uid"]


def test_a_pod_names_its_pool_and_tenant_and_neither_by_name(pods: Pods) -> None:
    sandbox = pods.start()

    async def hand_out() -> None:
        sandbox.hand_out("alice@example.org", reusable=False)

    pods.loop.call(hand_out())
    pods.run_in(sandbox, "pass")

    def labels() -> dict[str, str]:
        (found,) = [
            pod["metadata"]["labels"]
            for pod in pods.present()
            if pod["metadata"]["name"] == sandbox.guest.found["pod"]
        ]
        return dict(found)

    wait_until(lambda: "cofferdam.tenant" in labels(), seconds=60)
    assert labels()["cofferdam.pool"] == pods.settings.pool
    assert "alice" not in str(labels())
    pods.loop.call(sandbox.destroy())


def test_the_pod_is_removed_with_its_owner(pods: Pods) -> None:
    sandbox = pods.start()
    (pod,) = [
        each for each in pods.present() if each["metadata"]["name"] == sandbox.guest.found["pod"]
    ]
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Lease", f"cofferdam-{pods.settings.pool}")
    spec = pod["spec"]
    assert spec["activeDeadlineSeconds"] > 0
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    resources = spec["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    pods.loop.call(sandbox.destroy())

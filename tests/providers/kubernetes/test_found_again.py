"""Sessions in Pods outlive their pool's process, and are found from another machine."""

from __future__ import annotations

import signal

import pytest

from providers.errors import KeptSandboxLost
from providers.values import Command, Job
from tests.providers.kubernetes.conftest import NamedPool
from tests.support.waiting import wait_until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_session_is_found_again_from_another_machine(
    named_pool: NamedPool, number: signal.Signals
) -> None:
    sandbox = named_pool.keep(environment={"SECRET": "sesame"})
    sandbox.run(Job("import os\nx = 41"))
    sandbox.files.write("kept.txt", [b"content"])
    pid = sandbox.processes.start(Command(shell="sleep 1000")).pid
    before = named_pool.pod_of(sandbox)

    named_pool.stop(number)
    named_pool.start()

    assert sandbox.run(Job("print(x + 1, os.environ['SECRET'])")).stdout == "42 sesame\n"
    assert b"".join(sandbox.files.read("kept.txt")) == b"content"
    assert pid in [each.pid for each in sandbox.processes.list()]
    assert named_pool.pod_of(sandbox)["metadata"]["uid"] == before["metadata"]["uid"]
    # What the sandbox was given is nowhere at the Pod.
    assert "sesame" not in str(named_pool.pods())
    assert sandbox.close()
    wait_until(
        lambda: (
            before["metadata"]["uid"] not in [pod["metadata"]["uid"] for pod in named_pool.pods()]
        ),
        seconds=60,
    )


def test_warm_pods_of_a_killed_pool_are_removed_and_sessions_stay(named_pool: NamedPool) -> None:
    sandbox = named_pool.keep()
    named_pool.pool.wait_for(lambda stats: stats["templates"]["python"]["idle"] >= 1)
    kept = named_pool.pod_of(sandbox)["metadata"]["uid"]
    others = {pod["metadata"]["uid"] for pod in named_pool.pods()} - {kept}
    assert others

    named_pool.stop(signal.SIGKILL)
    named_pool.start()

    wait_until(
        lambda: not others & {pod["metadata"]["uid"] for pod in named_pool.pods()}, seconds=60
    )
    assert sandbox.run(Job("print('there')")).stdout == "there\n"


def test_a_pod_that_is_not_as_it_was_made_is_not_taken_over(named_pool: NamedPool) -> None:
    sandbox = named_pool.keep()
    pod = named_pool.pod_of(sandbox)
    named_pool.stop(signal.SIGTERM)
    # The image of a container is one of the few things of a Pod that can be changed.
    path = f"/api/v1/namespaces/{named_pool.namespace}/pods/{pod['metadata']['name']}"
    changed = {"spec": {"containers": [{"name": "sandbox", "image": "another"}]}}
    named_pool.cluster.request(
        "PATCH", path, changed, content_type="application/strategic-merge-patch+json"
    )

    named_pool.start()

    with pytest.raises(KeptSandboxLost):
        sandbox.run(Job("print('there')"))
    wait_until(
        lambda: (
            pod["metadata"]["uid"] not in [each["metadata"]["uid"] for each in named_pool.pods()]
        ),
        seconds=60,
    )


def test_a_session_whose_pod_was_deleted_meanwhile_is_lost(named_pool: NamedPool) -> None:
    sandbox = named_pool.keep()
    pod = named_pool.pod_of(sandbox)
    named_pool.stop(signal.SIGKILL)
    named_pool.delete(pod)

    named_pool.start()

    with pytest.raises(KeptSandboxLost):
        sandbox.run(Job("print('there')"))


def test_a_machine_that_has_the_pool_again_finds_what_another_one_has_renewed(
    named_pool: NamedPool,
) -> None:
    sandbox = named_pool.keep()
    sandbox.run(Job("x = 41"))
    first = named_pool.machine
    sandbox.renew(20)
    named_pool.stop(signal.SIGTERM)
    named_pool.start()
    sandbox.renew(3600)
    # So the lease that the first machine knows of is over.
    wait_until(lambda: named_pool.lease_at(first) < -1, seconds=60)
    named_pool.stop(signal.SIGTERM)

    named_pool.start(machine=first)

    assert sandbox.run(Job("print(x + 1)")).stdout == "42\n"


def test_a_pool_that_stops_leaves_its_name_to_the_next_one_at_once(named_pool: NamedPool) -> None:
    named_pool.keep()
    assert named_pool.holder()
    named_pool.stop(signal.SIGTERM)
    assert named_pool.holder() == ""

"""What a Pod's record says of its end: its code's doing, or a loss."""

from __future__ import annotations

from typing import Any

import pytest

from providers.runtime.launchers.kubernetes.guest import End, end_of


def pod(
    *, terminated: dict[str, Any] | None = None, deleted: bool = False, **status: Any
) -> dict[str, Any]:
    state = {"terminated": terminated} if terminated else {"running": {}}
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}
    return {
        "metadata": metadata,
        "status": {"containerStatuses": [{"name": "sandbox", "state": state}], **status},
    }


@pytest.mark.parametrize(
    ("found", "end"),
    [
        (pod(terminated={"exitCode": 0, "reason": "Completed"}), End(exit_code=0)),
        (pod(terminated={"exitCode": 137, "reason": "Error"}), End(exit_code=137)),
        (
            pod(terminated={"exitCode": 137, "reason": "OOMKilled"}),
            End(out_of_memory=True, exit_code=137),
        ),
        (pod(phase="Running"), End()),
        (pod(phase="Failed", reason="DeadlineExceeded"), End()),
    ],
)
def test_the_end_of_a_container_is_its_codes_doing(found: dict[str, Any], end: End) -> None:
    assert end_of(found) == end


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "The Pod was deleted"),
        (pod(deleted=True, terminated={"exitCode": 137, "reason": "Error"}), "deleted"),
        (
            pod(
                reason="Evicted",
                message="The node was low on memory.",
                terminated={"exitCode": 137, "reason": "Error"},
            ),
            "Evicted The node was low on memory.",
        ),
        (
            pod(
                conditions=[
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "PreemptionByScheduler",
                    }
                ],
                terminated={"exitCode": 137, "reason": "OOMKilled"},
            ),
            "PreemptionByScheduler",
        ),
    ],
)
def test_what_the_cluster_takes_away_is_lost_whatever_its_container_says(
    found: dict[str, Any] | None, why: str
) -> None:
    end = end_of(found)
    assert why in end.lost
    assert (end.out_of_memory, end.exit_code) == (False, None)

"""Two hosts, several tenants, and one fault of most kinds: what was accepted is carried out once.

And a conversation goes on where it was, or says that it cannot.
"""

from __future__ import annotations

import pytest

from tests.chaos.run import open_folder, run
from tests.conftest import require
from tests.support.servers import Servers

# The others are of the same mechanisms, and of `make chaos`.
KINDS = ("kill-web", "kill-worker", "kill-up", "term-master", "term-cluster", "postgres", "disk")


def test_what_two_hosts_accept_is_carried_out_once_whatever_breaks(own_servers: Servers) -> None:
    with open_folder() as folder:
        verdict = run(
            folder,
            own_servers,
            seconds=0,
            callers=5,
            seed=7,
            kinds=KINDS,
            pause=(0.2, 1.0),
            longest=1.0,
        )

    assert verdict.wrong == [], verdict.table()
    assert int(verdict.figures["processes killed"]) > 0
    assert int(verdict.figures["calls"]) > 10


@pytest.mark.slow
def test_conversations_count_on_or_are_lost_whatever_is_killed(own_servers: Servers) -> None:
    require("bwrap")
    with open_folder() as folder:
        verdict = run(
            folder,
            own_servers,
            seconds=0,
            callers=1,
            conversations=4,
            seed=5,
            kinds=("kill-web", "kill-worker", "kill-pool"),
            launcher="bubblewrap",
            pause=(1.0, 2.0),
            longest=1.0,
        )

    assert verdict.wrong == [], verdict.table()
    assert "succeeded" in verdict.figures["cells"], verdict.table()

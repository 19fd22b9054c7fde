"""django-q's cluster with an end in order: told once it finishes, told twice it ends now.

django-q waits for its worker processes without end, and tells them to end only when each is about
to take its next task. They learn of it from `draining`, and keep the time (`runs/worker.py`).
"""

from __future__ import annotations

import os
import signal
from typing import Any

from django_q import cluster

from providers import draining


class Cluster(cluster.Cluster):  # type: ignore[misc]
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        signal.signal(signal.SIGQUIT, self.sig_handler)

    def sig_handler(self, signum: int, frame: Any) -> None:
        if os.getpid() != self.pid:
            # A process of the cluster has inherited this, and is told by `draining`.
            return
        again = draining.is_draining()
        draining.begin(for_all=True)
        if again or signum == signal.SIGQUIT:
            draining.begin_ending(for_all=True)
        if not again:
            self.stop()

"""Search as a capability: the index of code forgets what a record no longer has."""

from __future__ import annotations

from executions.capabilities.search.service import forget_code
from executions.runs.extensions import Extension
from executions.runs.models import Execution


class CodeSearch(Extension):
    tasks = {"executions.tasks.index_new_code": 1}

    def before_seal(self, ended: Execution, *, had_code: bool) -> None:
        # Only such a record was indexed while it was open (`index_new_code`). The index comes
        # before the ledger, as in retention.
        if (ended.run_at is not None or ended.background) and had_code and not ended.code:
            forget_code({ended.code_hash}, but_of=(ended.pk,))


CAPABILITY = CodeSearch()

"""What the workers are asked to do, by dotted name. Rules live in the services."""

from __future__ import annotations

from executions.services import code_search, compaction, retention, spending, stale, worker
from executions.services.ledger import checkpoints


def run_queued_execution(execution_id: str) -> None:
    worker.run_queued(execution_id)


def end_stale_executions() -> int:
    return stale.end_stale_executions()


def write_ledger_checkpoint() -> int | None:
    point = checkpoints.write_checkpoint()
    return point.sequence if point else None


def apply_retention() -> int:
    return sum(erasure.executions for erasure in retention.apply_retention())


def index_new_code() -> int:
    return code_search.index_new_code()


def watch_spending() -> int:
    return spending.watch_spending()


def give_space_back() -> int:
    return compaction.give_space_back()

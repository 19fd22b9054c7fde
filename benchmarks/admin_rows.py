"""A million executions, and what goes with them, written by a few statements."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

DAYS = 30
PROGRAMS = 50_000
_OTHER_ROWS = 100_000


def fill(executions: int) -> None:
    """`executions` of the last DAYS days, nine of ten one tenant's; as many ledger entries."""
    from django.db import connection

    from executions.capabilities.search.models import CodeSearchProgress
    from executions.runs.models import Execution
    from executions.tenants.models import Tenant

    tenant = Tenant.objects.create(slug="bench", name="Bench")
    now = datetime.now(UTC)
    template = Execution(
        tenant=tenant,
        tenant_slug="bench",
        api_key_name="key",
        language="python",
        entrypoint="auto",
        timeout=10,
        status="succeeded",
        stdout="x" * 200,
        meta={"cpu_seconds": 0.01},
        hops=[],
        deadline=now,
        finished_at=now,
        total_ms=5.6,
    )
    spread = timedelta(days=DAYS) / executions
    first = int((now - timedelta(days=DAYS)).timestamp() * 1000)
    step = spread.total_seconds() * 1000
    dialect = _POSTGRESQL if connection.vendor == "postgresql" else _SQLITE
    ms = f"({first} + CAST(n * {step} AS BIGINT))"
    at = dialect["at"].format(ms=ms)
    varied = {
        "id": dialect["id"].format(ms=ms, n="n"),
        "tenant_slug": "CASE WHEN n % 10000 = 7 THEN 'small' WHEN n % 10 = 0"
        " THEN 't' || CAST(n / 10 % 150 AS TEXT) ELSE 'bench' END",
        "api_key_prefix": "'k' || CAST(n % 50 AS TEXT)",
        "status": "CASE WHEN n % 20 = 1 THEN 'failed' WHEN n % 50 = 3 THEN 'timed_out'"
        " ELSE 'succeeded' END",
        "error_code": "CASE WHEN n % 20 <> 1 AND n % 50 = 3 THEN 'SB005' ELSE '' END",
        "exit_code": "CASE WHEN n % 20 = 1 THEN 1 WHEN n % 9973 = 0 THEN 137 ELSE 0 END",
        "provider": "CASE WHEN n % 7 = 0 THEN 'e2b' ELSE 'local' END",
        "runtime": "CASE WHEN n % 7 = 0 THEN 'firecracker' ELSE 'bubblewrap' END",
        "language": "CASE WHEN n % 11 = 0 THEN 'bash' ELSE 'python' END",
        "agent": "CASE WHEN n % 9000 = 0 THEN 'rare' WHEN n % 2 = 0 THEN 'coder' END",
        "conversation": "CASE WHEN n % 3 = 0 THEN 'c' || CAST(n % 1000 AS TEXT) END",
        "observed": "CASE WHEN n % 4000 = 0 THEN 'network' END",
        "replay_of_id": f"CASE WHEN n > 100 AND n % 5000 = 0 THEN"
        f" {dialect['id'].format(ms=ms.replace('n *', '(n - 100) *'), n='(n - 100)')} END",
        "code_hash": f"'sha256:' || {dialect['hash'].format(n=f'(n % {PROGRAMS})')}",
        "code": f"'import os, number_' || CAST(n % {PROGRAMS} AS TEXT) || '_; print(1) # ' ||"
        " 'what follows makes it as long as programs are, some two hundred characters or so,"
        " so that a page of the database has as many rows as it would have'",
        "created_at": at,
        "started_at": at,
        "finished_at": at,
        "deadline": at,
        "cost": "CASE WHEN n % 7 = 0 THEN 0.001 END",
        "total_ms": "5.6 + n % 100",
    }
    names, values = [], []
    parameters: list[Any] = []
    for field in Execution._meta.concrete_fields:
        names.append(connection.ops.quote_name(field.column))
        if field.column in varied:
            values.append(varied[field.column])
        else:
            values.append("%s")
            parameters.append(field.get_db_prep_save(field.pre_save(template, True), connection))
    series = dialect["series"]
    with connection.cursor() as cursor:
        # Of our own names and numbers; what has a percent sign goes in after the parameters.
        sql = (
            f"INSERT INTO executions_execution ({', '.join(names)}) "
            f"SELECT {', '.join(value.replace(' % ', ' %% ') for value in values)} "
            f"FROM {series.format(count=executions)}"
        )
        cursor.execute(sql, parameters)
        last = executions - 1
        cursor.execute("SELECT COALESCE(MAX(sequence), 0) FROM executions_ledgerentry")
        begin = cursor.fetchone()[0]
        cursor.execute(
            "INSERT INTO executions_ledgerentry"
            " (sequence, kind, subject, execution_id, at, statement, digest, key_id, signature)"
            f" SELECT {begin} + 1 + n, CASE WHEN n %% 1000 = 1 THEN 'refusal' ELSE 'execution' END,"
            " 'bench',"
            f" CASE WHEN n %% 1000 <> 1 THEN {dialect['id'].format(ms=ms, n='n')} END, {at},"
            ' \'{"subject": "bench"}\', ' + dialect["hash"].format(n="n") + ","
            " '0123456789abcdef', ''"
            f" FROM {series.format(count=executions)}",
            [],
        )
        cursor.execute(
            "INSERT INTO executions_codetext (code_hash, code)"
            f" SELECT {varied['code_hash']}, {varied['code']}"
            f" FROM {series.format(count=min(PROGRAMS, executions))}".replace(" % ", " %% "),
            [],
        )
        for statement in _others(dialect, at, series):
            cursor.execute(statement, [])
    newest = Execution.objects.order_by("-pk").values_list("pk", flat=True)[min(100, last)]
    CodeSearchProgress.objects.update_or_create(pk=1, defaults={"before": newest})
    with connection.cursor() as cursor:
        for statement in _counts(dialect["hour"]):
            cursor.execute(statement, [])
        cursor.execute("ANALYZE")


def _counts(hour: str) -> list[str]:
    """What was counted as the executions ended. The buckets are as many as they would be."""
    rows = (
        ("outcome", "provider", "TRIM(status || ' ' || error_code)", "COALESCE(SUM(cost), 0)"),
        ("tenant", "tenant_slug", "''", "0"),
        ("latency", "provider", "CAST(CAST(total_ms / 5 AS INTEGER) AS TEXT)", "0"),
        ("priced", "provider", "''", "0"),
    )
    return [
        "INSERT INTO executions_statistic (kind, hour, name, label, count, amount)"
        f" SELECT '{kind}', {hour}, {name}, {label}, COUNT(*), {amount} FROM executions_execution"
        f"{' WHERE cost IS NOT NULL' if kind == 'priced' else ''} GROUP BY 1, 2, 3, 4"
        for kind, name, label, amount in rows
    ]


def _others(dialect: dict[str, str], at: str, series: str) -> list[str]:
    rows = series.format(count=_OTHER_ROWS)
    from django.contrib.auth import get_user_model

    user = get_user_model().objects.order_by("pk")[0].pk
    return [
        "INSERT INTO django_admin_log"
        " (action_time, object_id, object_repr, action_flag, change_message, user_id)"
        f" SELECT {at}, '1', 'row', 1 + n %% 3, '[]', {user} FROM {rows}",
        "INSERT INTO providers_configversion (subject, shown_as, version, content, content_hash,"
        " author, approved_by, reason, diff, created_at)"
        f" SELECT 'p' || CAST(n %% 100 AS TEXT), '', 1000 + n / 100, '', '', 'user:admin', '', '',"
        f" '[]', {at} FROM {rows}",
    ]


_SQLITE = {
    "id": "printf('%%012x70008%%015x', {ms}, {n})",
    "hour": "strftime('%%Y-%%m-%%d %%H:00:00', finished_at)",
    "hash": "printf('%%064x', {n})",
    "at": "strftime('%%Y-%%m-%%d %%H:%%M:%%f', {ms} / 1000.0, 'unixepoch')",
    "series": "(WITH RECURSIVE s(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s"
    " WHERE n + 1 < {count}) SELECT n FROM s) AS series",
}
_POSTGRESQL = {
    "id": "CAST(lpad(to_hex({ms}), 12, '0') || '70008' || lpad(to_hex({n}), 15, '0') AS UUID)",
    "hour": "date_trunc('hour', finished_at)",
    "hash": "lpad(to_hex({n}), 64, '0')",
    "at": "to_timestamp({ms} / 1000.0)",
    "series": "(SELECT generate_series(0, CAST({count} AS BIGINT) - 1) AS n) AS series",
}

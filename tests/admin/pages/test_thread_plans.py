"""By which index SQLite finds threads and their calls. Of so few rows PostgreSQL takes any."""

from __future__ import annotations

import pytest

from executions.capabilities.threads import service
from executions.runs.models import Execution
from tests.conftest import Caller
from tests.support.agent_threads import call

pytestmark = pytest.mark.django_db


def test_no_other_thread_is_read_for_one(alice: Caller) -> None:
    """Also of a tenant that was removed, whose executions have its slug alone."""
    one = call(alice.tenant, "t")
    latest = Execution.objects.filter(service.HAS_THREAD, service.is_latest(), pk=one.pk)
    assert latest.explain().count("execution_conversation (conversation=? AND tenant_id=? AND") == 2
    for tenant_id in (one.tenant_id, None):
        one.tenant_id = tenant_id
        plan = service.calls_of(one).explain()
        assert "execution_conversation (conversation=? AND tenant_id=?)" in plan
        assert "TEMP B-TREE" not in plan

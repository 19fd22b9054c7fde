"""What a draft would have blocked of what ran, how it comes in force, and who decides that."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from executions.capabilities.policies.capability import rules_for
from executions.capabilities.policies.models import Policy
from executions.capabilities.policies.service import dry_run
from executions.kernel.text import first_uuid7
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.tenants.models import Tenant
from providers.models import ConfigVersion, PendingChange
from providers.services import approve
from providers.services.guarded_rows import restore
from tests.conftest import Caller
from tests.support.policies import in_force

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.usefixtures("policies_forgotten"),
    pytest.mark.database,
]

SHELL = "import os\nos.system('id')"


def ran(tenant: Tenant, code: str = "60*60", *, days: int = 0, number: int = 0, **more: Any) -> Any:
    at = timezone.now() - timedelta(days=days, seconds=number)
    values = {
        "tenant": tenant,
        "tenant_slug": tenant.slug,
        "language": "python",
        "code_hash": f"sha256:{hash(code)}",
        "timeout": 10,
        "status": "succeeded",
        "finished_at": at,
        "created_at": at,
        "deadline": at,
        **more,
    }
    return Execution.objects.create(pk=first_uuid7(at), code=code, **values)


@pytest.fixture
def history(alice: Caller, charlie: Caller) -> dict[str, Any]:
    return {
        "shell": ran(alice.tenant, SHELL, number=1),
        "again": ran(alice.tenant, SHELL, number=2),
        "honest": ran(alice.tenant, number=3),
        "erased": ran(alice.tenant, "", number=4),
        "bash": ran(alice.tenant, "os.system(1)", number=5, language="bash"),
        "old": ran(alice.tenant, SHELL, days=40),
        "other": ran(charlie.tenant, SHELL, number=6),
    }


def signed_in(name: str, *permissions: str) -> tuple[User, Client]:
    user = User.objects.create_user(name, password="x", is_staff=True)
    codes = [each.partition(".")[2] for each in permissions]
    user.user_permissions.set(Permission.objects.filter(codename__in=codes))
    client = Client()
    client.force_login(user)
    return user, client


ALL = tuple(f"executions.{verb}_policy" for verb in ("view", "add", "change", "delete"))
SEES = "executions.view_execution"


def page(name: str, *args: Any) -> str:
    return reverse(f"admin:executions_policy_{name}", args=args)


def test_a_dry_run_counts_and_lists_what_a_policy_would_have_blocked(
    alice: Caller, history: dict[str, Any]
) -> None:
    draft = in_force(
        alice.tenant.slug, draft=True, analysis="block", calls="os.system", max_timeout=5
    )
    run = dry_run(draft)
    assert (run.executions, run.blocked, run.warned, run.unknown, run.cut) == (5, 2, 3, 1, "")
    found = [(hit.execution_id, hit.line, hit.name) for hit in run.hits if hit.rule == "call"]
    assert found == [(history[name].pk, 2, "os.system") for name in ("shell", "again")]
    assert run.rules == {"call: os.system": 2, "timeout": 5}
    assert run.until == history["bash"].created_at
    assert dry_run(draft, 60).blocked == 3

    draft.max_timeout, draft.languages, draft.analysis = None, "python", "warn"
    run = dry_run(draft)
    assert (run.blocked, run.warned, run.rules["language"]) == (1, 2, 1)
    draft.languages, draft.analysis = "", "ask"
    assert (dry_run(draft).asked, dry_run(draft).warned) == (2, 0)
    draft.ask_always = True
    assert (dry_run(draft).asked, dry_run(draft).blocked) == (5, 0)
    # It looks, and changes nothing.
    assert rules_for(alice.tenant.slug) is None


def test_a_dry_run_ends_at_its_bounds_and_says_where(
    alice: Caller, history: dict[str, Any]
) -> None:
    draft = in_force(alice.tenant.slug, draft=True, analysis="block", calls="os.system")
    run = dry_run(draft, most_rows=2, most_listed=1)
    assert (run.executions, run.blocked, len(run.hits)) == (2, 2, 1)
    assert "2 executions" in run.cut
    assert run.until == history["again"].created_at
    run = dry_run(draft, seconds=0)
    assert (run.executions, run.until, run.cut) == (0, None, "the limit of 0 seconds was reached")


def test_the_policy_of_all_others_is_tried_on_tenants_without_one(
    alice: Caller, charlie: Caller, history: dict[str, Any]
) -> None:
    in_force(alice.tenant.slug)
    run = dry_run(in_force(draft=True, analysis="block", calls="os.system"))
    assert [hit.execution_id for hit in run.hits] == [history["other"].pk]

    out = StringIO()
    call_command("dry_run_policy", "denylist", tenant=charlie.tenant.slug, json=True, stdout=out)
    told = json.loads(out.getvalue())
    assert (told["executions"], told["blocked"], told["cut"]) == (1, 1, "")
    assert told["hits"][0]["execution_id"] == str(history["other"].pk)
    out = StringIO()
    call_command("dry_run_policy", "remarks", tenant=alice.tenant.slug, rows=1, stdout=out)
    assert "call line 2: os.system" not in out.getvalue()
    assert "import line 2: os.system" in out.getvalue()
    assert "INCOMPLETE: the limit of 1 executions was reached" in out.getvalue()
    for wrong in (("nothing",), ("denylist", "--tenant", "nobody"), ("denylist", "--days", "0")):
        with pytest.raises(CommandError):
            call_command("dry_run_policy", *wrong)


def test_a_draft_made_of_a_preset_is_tried_and_put_in_force(
    alice: Caller, history: dict[str, Any]
) -> None:
    _, client = signed_in("ada", *ALL, SEES)
    form = client.get(page("add"), {"preset": "denylist"})
    initial = form.context["adminform"].form.initial
    assert (initial["analysis"], "subprocess" in initial["imports"]) == ("block", True)
    assert b"the kernel" in form.content
    values = {name: value for name, value in initial.items() if value is not None}
    answer = client.post(page("add"), {**values, "tenant_slug": alice.tenant.slug})
    assert answer.status_code == 302, answer.context["errors"]
    draft = Policy.objects.get()
    assert draft.draft
    assert rules_for(alice.tenant.slug) is None

    tried = client.post(page("dry_run", draft.pk), {"days": 30})
    assert tried.context["run"].blocked == 2
    assert str(history["shell"].pk) in tried.content.decode()
    assert client.get(page("put_in_force", draft.pk)).status_code == 403
    answer = client.post(page("put_in_force", draft.pk), {"_reason": "tried"})
    policy = Policy.objects.get(draft=False)
    assert answer.headers["Location"] == page("change", policy.pk)
    rules = rules_for(alice.tenant.slug)
    assert rules is not None
    assert (rules.policy.pk, rules.version, rules.blocks) == (policy.pk, 1, True)
    assert ConfigVersion.objects.get(subject=f"executions.policy:{policy.pk}").reason == "tried"
    entered = [each.stated for each in LedgerEntry.objects.filter(kind="policy").order_by("pk")]
    assert [each["draft"] for each in entered] == [True, False]

    # Whose it is stays, and another draft of it goes on from there.
    client.post(page("change", policy.pk), {**values, "tenant_slug": "", "analysis": "warn"})
    policy.refresh_from_db()
    assert (policy.tenant_slug, policy.analysis) == (alice.tenant.slug, "warn")
    client.post(page("draft", policy.pk))
    assert Policy.objects.filter(draft=True, analysis="warn").count() == 1
    # Of a tenant that is gone.
    Policy.objects.update(tenant_slug="gone")
    told = client.post(page("draft", policy.pk), follow=True).content.decode()
    assert "Must be the slug of a tenant" in told


def test_who_may_not_change_policies_or_see_what_ran_does_not(
    alice: Caller, history: dict[str, Any]
) -> None:
    draft = in_force(alice.tenant.slug, draft=True)
    _, looks = signed_in("auditor", ALL[0], SEES)
    assert looks.get(page("dry_run", draft.pk)).status_code == 200
    assert looks.post(page("put_in_force", draft.pk)).status_code == 403
    assert looks.post(page("draft", draft.pk)).status_code == 403
    _, blind = signed_in("clerk", *ALL)
    assert blind.post(page("dry_run", draft.pk), {"days": 30}).status_code == 403
    _, stranger = signed_in("stranger")
    assert stranger.get(page("dry_run", draft.pk)).status_code == 403
    assert Client().get(page("dry_run", draft.pk)).status_code == 302
    assert looks.get(page("dry_run", 0)).status_code == 404
    assert not Policy.objects.filter(draft=False).exists()


def test_under_the_two_person_rule_a_draft_is_free_and_what_is_in_force_takes_two(
    alice: Caller, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    bea, _ = signed_in("bea", *ALL, SEES, "providers.change_pendingchange")
    _, client = signed_in("ada", *ALL, SEES)
    answer = client.post(page("add"), {"tenant_slug": "", "analysis": "block", "calls": "eval"})
    assert answer.status_code == 302
    draft = Policy.objects.get()
    client.post(page("put_in_force", draft.pk))
    assert not Policy.objects.filter(draft=False).exists()
    waiting = PendingChange.objects.get(status="waiting")
    approve(waiting, approver=bea)
    policy = Policy.objects.get(draft=False)
    assert (policy.tenant_slug, policy.calls) == ("", "eval")

    # Neither a change in place nor a removal is one person's.
    client.post(page("change", policy.pk), {"analysis": "off"})
    client.post(page("delete", policy.pk), {"post": "yes"})
    policy.refresh_from_db()
    assert policy.analysis == "block"
    changes = PendingChange.objects.filter(status="waiting").order_by("pk")
    assert [change.action for change in changes] == ["save", "remove"]
    approve(changes[0], approver=bea)
    rules = rules_for("anybody")
    assert rules is not None
    assert (rules.version, rules.looks) == (2, False)

    settings.TWO_PERSON_RULE = False
    restore(bea, ConfigVersion.objects.get(subject=f"executions.policy:{policy.pk}", version=1))
    rules = rules_for("anybody")
    assert rules is not None
    assert (rules.version, rules.blocks) == (3, True)
    assert verify().is_intact

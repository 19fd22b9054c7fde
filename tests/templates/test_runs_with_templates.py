"""The field `template` of runs and sessions: which version it means, and what it gives."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from executions.capabilities.network.models import NetworkList
from executions.capabilities.playground.service import replay_sync
from executions.capabilities.templates import builds, names
from executions.capabilities.templates.models import TemplateVersion
from executions.kernel.coroutines import run_sync
from executions.ledger.models import LedgerEntry
from executions.runs.models import Execution
from executions.sessions.models import Session
from executions.tenants.keys import create_api_key
from providers.services.settings_cache import forget_all
from tests.conftest import Caller
from tests.support.lying_provider import Liar
from tests.support.networks import listed
from tests.support.package_index import PackageIndex
from tests.support.running import run, run_queued
from tests.support.sessions import cell, opened
from tests.support.sessions import row as session_row
from tests.support.templates import again, built, resolves

SESSIONS = "/api/v1/sessions"
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]


@pytest.fixture
def science(alice: Caller, index: PackageIndex, resolver: Liar) -> TemplateVersion:
    """A template of the owner's tenant with a package, a variable and a file."""
    index.add("tinymath")
    resolves(resolver, index)
    version = built(
        alice.tenant,
        python=["tinymath"],
        environment={"COLOUR": "blue", "SHAPE": "round"},
        files={"data/a.txt": "theirs", "b.txt": "theirs"},
    )
    assert version.state == "ready", version.problem
    resolver.module.jobs.clear()
    resolver.module.specs.clear()
    resolver.answers(stdout="42\n")
    Execution.objects.all().delete()
    return version


def used(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.content
    found: dict[str, Any] = answer.json()["template"]
    return found


def refusal(answer: Any) -> str:
    assert answer.status_code == 400, answer.content
    error = answer.json()["error"]
    assert error["field"] == "template", error
    return str(error["message"])


def test_a_run_has_the_files_variables_and_packages_of_its_template(
    alice: Caller, science: TemplateVersion, resolver: Liar
) -> None:
    answer = run(
        alice,
        "1",
        template="science",
        env={"COLOUR": "red"},
        files=[{"path": "b.txt", "content_base64": "b3Vycw=="}],
    )
    assert used(answer) == {"name": "science", "version": 1, "digest": science.digest}
    assert resolver.module.specs[-1].digest == science.digest
    job = resolver.module.jobs[-1]
    # What the caller gives wins.
    assert dict(job.environment) == {"COLOUR": "red", "SHAPE": "round"}
    assert {each.path: each.content for each in job.files} == {
        "data/a.txt": b"theirs",
        "b.txt": b"ours",
    }


def test_a_run_without_one_has_none(
    alice: Caller, science: TemplateVersion, resolver: Liar
) -> None:
    answer = run(alice, "1")
    assert (answer.json()["template"], resolver.module.specs[-1].digest) == (None, "")


def test_a_name_is_the_newest_version_and_a_number_that_one(
    alice: Caller, science: TemplateVersion
) -> None:
    second = again(science.template, environment={"COLOUR": "red"})
    assert used(run(alice, "1", template="science"))["version"] == second.number == 2
    assert used(run(alice, "1", template="science@1"))["digest"] == science.digest
    assert "science@3" in refusal(run(alice, "1", template="science@3"))


def test_the_tenants_own_comes_before_the_installations(
    alice: Caller, charlie: Caller, science: TemplateVersion
) -> None:
    common = built(None, environment={"COLOUR": "green"})
    assert used(run(alice, "1", template="science"))["digest"] == science.digest
    assert used(run(charlie, "1", template="science"))["digest"] == common.digest


def test_an_unknown_name_is_refused_with_those_that_there_are(
    alice: Caller, charlie: Caller, science: TemplateVersion
) -> None:
    assert "Available: science" in refusal(run(alice, "1", template="sciense"))
    # A stranger is not told that there is one.
    assert "Available: none" in refusal(run(charlie, "1", template="science"))
    for name in ("../x", "science@", "science@0", "science@1@1", "Science", "x" * 80):
        refusal(run(alice, "1", template=name))
    assert not Execution.objects.exists()


def test_one_that_was_removed_or_is_not_built_serves_nobody(
    alice: Caller, science: TemplateVersion
) -> None:
    builds.request_build(science.template, "test", refresh=True)
    assert used(run(alice, "1", template="science"))["version"] == 1
    run_sync(builds.remove(science.template, "test"))
    refusal(run(alice, "1", template="science"))


def test_a_queued_run_has_the_version_of_when_it_begins(
    alice: Caller, science: TemplateVersion
) -> None:
    body = {"code": "1", "mode": "async", "template": "science"}
    queued = alice.client.post("/api/v1/executions", body)
    assert queued.status_code == 202, queued.content
    again(science.template, environment={"COLOUR": "red"})
    outcome = run_queued()
    assert outcome is not None
    assert outcome.execution.meta["template"]["version"] == 2


def test_a_replay_has_the_version_that_it_ran_with(
    alice: Caller, science: TemplateVersion, resolver: Liar
) -> None:
    run(alice, "1", template="science")
    again(science.template, environment={"COLOUR": "red"})
    outcome = replay_sync(Execution.objects.get())
    assert outcome.error is None, outcome.error
    assert outcome.execution.meta["template"] == {
        "name": "science",
        "version": 1,
        "digest": science.digest,
    }


def test_a_providers_own_template_stands_for_one_of_the_installation_that_it_is_named_for(
    alice: Caller, science: TemplateVersion, resolver: Liar, index: PackageIndex
) -> None:
    resolves(resolver, index)
    shared = built(None, "shared", python=["tinymath"])
    resolver.answers(stdout="42\n")
    resolver.does("holds_templates", lambda: False)
    resolver.does("own", lambda: ("shared", "science"))
    answer = run(alice, "1", template="shared")
    assert used(answer) == {"name": "shared", "version": 1, "digest": shared.digest}
    assert resolver.module.specs[-1].template_name == "shared"
    # A tenant gives its own any name.
    refused = run(alice, "1", template="science")
    assert refused.json()["error"]["field"] == "template"
    resolver.does("own", lambda: ("science",))
    assert run(alice, "1", template="shared").json()["error"]["field"] == "template"


def test_a_provider_that_holds_no_templates_is_passed_over(
    alice: Caller, science: TemplateVersion, resolver: Liar
) -> None:
    resolver.does("holds_templates", lambda: False)
    answer = run(alice, "1", template="science")
    assert answer.status_code >= 400
    error = answer.json()["error"]
    assert (error["field"], "does not hold templates" in error["message"]) == ("template", True)
    assert resolver.module.jobs == []


def test_a_key_is_held_to_its_templates_in_runs_too(
    alice: Caller, science: TemplateVersion
) -> None:
    built(alice.tenant, "other")
    held = Caller(*create_api_key(alice.tenant, "held", templates="science"))
    assert used(run(held, "1", template="science"))["version"] == 1
    assert used(run(held, "1", template="science@1"))["version"] == 1
    for body in ({"template": "other"}, {}):
        answer = run(held, "1", **body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (403, "template")
    pinned = Caller(*create_api_key(alice.tenant, "pinned", templates="science@1"))
    assert run(pinned, "1", template="science@1").status_code == 200
    assert run(pinned, "1", template="science").status_code == 403


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("templateversion", 'declaration = \'{"environment": {"EVIL": "1"}}\''),
        ("templateversion", "digest = '" + "0" * 64 + "'"),
        ("templateversion", "lock = '[]'"),
        ("template", "description = 'changed'"),
    ],
)
def test_a_row_that_was_changed_in_the_database_serves_nobody(
    table: str, change: str, alice: Caller, science: TemplateVersion, resolver: Liar
) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE executions_{table} SET {change}")
    assert "changed in the database" in refusal(run(alice, "1", template="science"))
    assert resolver.module.jobs == []
    assert any(
        each.stated.get("action") == "altered outside"
        for each in LedgerEntry.objects.filter(kind__in=("template", "template_version"))
    )


def test_a_version_that_was_added_in_the_database_serves_nobody(
    alice: Caller, charlie: Caller, science: TemplateVersion
) -> None:
    # A stranger's template is made the own one of another tenant.
    with connection.cursor() as cursor:
        cursor.execute("UPDATE executions_template SET tenant_id = %s", [charlie.tenant.pk])
    assert "changed in the database" in refusal(run(charlie, "1", template="science"))


def test_the_templates_list_takes_away_from_the_network(
    alice: Caller, index: PackageIndex, resolver: Liar
) -> None:
    listed("pypi.org", "example.com", tenant=alice.tenant.slug)
    installation = {"mode": "allowlist", "rules": ["pypi.org"]}
    version = built(alice.tenant, environment={"A": "1"}, network=installation)
    assert version.state == "ready", version.problem
    common = NetworkList.objects.get(tenant_slug="")
    common.rules += "\npypi.org\nexample.com"
    common.save()
    asked = {"allow": ["pypi.org", "example.com"]}
    answer = run(alice, "1", template="science", network=asked)
    assert answer.status_code == 200, answer.content
    network = resolver.module.specs[-1].network
    names_of = [layer.name for layer in network.layers]
    assert names_of == ["installation", "tenant", "template", "run"]
    from providers.network import Target

    reach = {
        host: network.judge(Target(host, 443, "https")).is_allowed
        for host in ("pypi.org", "example.com")
    }
    assert reach == {"pypi.org": True, "example.com": False}
    # It gives nothing.
    assert run(alice, "1", template="science").status_code == 200
    assert resolver.module.specs[-1].network is None


@pytest.mark.parametrize(
    ("limits", "asked", "longest", "seconds"),
    [
        ({"timeout": 5}, None, 60, 5),
        ({"timeout": 5}, 20, 60, 20),
        ({"max_timeout": 8}, None, 60, 8),
        ({"timeout": 5, "max_timeout": 8}, 20, 60, 8),
        # They give nothing.
        ({"timeout": 50, "max_timeout": 500}, None, 30, 30),
    ],
)
def test_the_limits_of_a_template_take_away_from_the_time_of_its_runs(
    limits: dict[str, float],
    asked: float | None,
    longest: float,
    seconds: float,
    alice: Caller,
    index: PackageIndex,
    resolver: Liar,
) -> None:
    version = built(alice.tenant, environment={"A": "1"}, limits=limits)
    assert version.state == "ready", version.problem
    resolver.does("max_timeout", lambda: longest)
    named = {} if asked is None else {"timeout": asked}
    assert run(alice, "1", template="science", **named).status_code == 200
    assert resolver.module.jobs[-1].timeout == seconds
    assert Execution.objects.latest("created_at").timeout == seconds


@pytest.fixture
def common(kept_here: None, index: PackageIndex, alice: Caller) -> TemplateVersion:
    version = built(alice.tenant, environment={"COLOUR": "blue"}, files={"data/a.txt": "theirs"})
    assert version.state == "ready", version.problem
    return version


SHOW = "import os; print(os.environ.get('COLOUR'), open('data/a.txt').read())"


def test_a_session_has_its_template_from_the_start(alice: Caller, common: TemplateVersion) -> None:
    session = opened(alice, template="science")
    assert session["template"] == "science@1"
    answer = cell(alice, session, SHOW).json()
    assert answer["stdout"] == "blue theirs\n", answer
    assert answer["template"] == {"name": "science", "version": 1, "digest": common.digest}
    again(common.template, environment={"COLOUR": "red"})
    # It keeps what it has.
    assert cell(alice, session, SHOW).json()["template"]["version"] == 1


def test_the_limits_hold_in_a_session(alice: Caller, kept_here: None, index: PackageIndex) -> None:
    built(alice.tenant, environment={"A": "1"}, limits={"timeout": 4, "max_timeout": 6})
    session = opened(alice, template="science")
    for named, seconds in (({}, 4.0), ({"timeout": 5}, 5.0), ({"timeout": 9}, 6.0)):
        assert cell(alice, session, "1", **named).json()["status"] == "succeeded"
        assert Execution.objects.latest("created_at").timeout == seconds


def test_a_session_keeps_its_template_when_that_is_removed(
    alice: Caller, common: TemplateVersion
) -> None:
    session = opened(alice, template="science")
    run_sync(builds.remove(common.template, "test"))
    assert cell(alice, session, SHOW).json()["stdout"] == "blue theirs\n"
    assert session_row(session).template_version == common.pk


def test_a_session_of_an_unknown_template_is_refused(
    alice: Caller, charlie: Caller, common: TemplateVersion
) -> None:
    answer = alice.client.post(SESSIONS, {"template": "sciense"})
    assert "Available: science" in refusal(answer)
    refusal(charlie.client.post(SESSIONS, {"template": "science"}))
    assert not Session.objects.exists()


def test_a_session_of_a_row_that_was_changed_is_refused(
    alice: Caller, common: TemplateVersion
) -> None:
    with connection.cursor() as cursor:
        cursor.execute('UPDATE executions_templateversion SET declaration = \'{"npm": ["x"]}\'')
    names._kept.clear()
    assert "changed in the database" in refusal(
        alice.client.post(SESSIONS, {"template": "science"})
    )


def test_a_queued_run_whose_key_was_narrowed_meanwhile_does_not_begin(
    alice: Caller, science: TemplateVersion, resolver: Liar
) -> None:
    body = {"code": "1", "mode": "async", "template": "science"}
    assert alice.client.post("/api/v1/executions", body).status_code == 202
    key = alice.api_key
    key.templates = "other"
    key.save()
    outcome = run_queued()
    assert outcome is not None
    assert "no longer use its template" in str(outcome.error)
    assert resolver.module.jobs == []


def test_who_misses_a_module_is_told_which_template_has_it(
    alice: Caller, charlie: Caller, science: TemplateVersion, resolver: Liar
) -> None:
    missing = "ModuleNotFoundError: No module named 'tinymath'\n"
    resolver.answers(stderr=missing, exit_code=1)
    said = "The template science has it: name it in the field template."
    assert said in run(alice, "import tinymath").json()["advice"]
    assert said not in run(charlie, "import tinymath").json()["advice"]
    resolver.answers(stderr=missing.replace("tinymath", "../../etc"), exit_code=1)
    assert said not in run(alice, "import tinymath").json()["advice"]


def test_runs_with_a_network_find_the_mirror_and_others_do_not(
    alice: Caller, resolver: Liar, settings: Any
) -> None:
    common = NetworkList.objects.get(tenant_slug="")
    common.rules = "mirror.example:8080"
    common.save()
    forget_all()
    settings.PACKAGE_INDEX_URL = "http://mirror.example:8080/simple"
    settings.NPM_REGISTRY_URL = "http://mirror.example:8080/npm"
    resolver.answers(stdout="1\n")
    run(alice, "1", env={"UV_DEFAULT_INDEX": "own"}, network={"allow": ["mirror.example:8080"]})
    assert dict(resolver.module.jobs[-1].environment) == {
        "PIP_INDEX_URL": "http://mirror.example:8080/simple",
        "PIP_TRUSTED_HOST": "mirror.example",
        "UV_DEFAULT_INDEX": "own",
        "npm_config_registry": "http://mirror.example:8080/npm",
    }
    run(alice, "1")
    assert dict(resolver.module.jobs[-1].environment) == {}

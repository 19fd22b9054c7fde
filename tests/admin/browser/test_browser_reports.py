"""The page of a report in a browser: it is asked for, and shows by itself when it is made."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from executions.capabilities.reports import service as reports
from executions.capabilities.reports.models import Report
from tests.conftest import Caller
from tests.support.browser import keep_picture
from tests.support.running import LOCAL, activate, run


def test_a_report_is_asked_for_and_shows_by_itself_when_it_is_made(
    page: Page, caller: Caller, complaints: list[str]
) -> None:
    activate("local", LOCAL)
    assert run(caller, "print('# 打印 名字')").json()["status"] == "succeeded"

    page.goto("/admin/executions/report/add/")
    page.get_by_label("Tenant").fill("wonderland")
    page.get_by_label("Include code").check()
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("link", name="PDF")).to_be_visible()
    expect(page.get_by_text("no problems found", exact=True)).to_be_visible()
    keep_picture(page, "report")

    report = Report.objects.create(tenant_slug="wonderland", made_by="user:admin")
    page.goto(f"/admin/executions/report/{report.pk}/change/")
    expect(page.get_by_text("Queued")).to_be_visible()
    assert reports.make_one(report.pk)
    with page.expect_download() as download:
        page.get_by_role("link", name="JSON").click()
    assert download.value.path().read_bytes().startswith(b'{"report":')
    assert complaints == []

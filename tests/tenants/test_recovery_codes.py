"""The way back from a lost authenticator."""

from __future__ import annotations

import re
import threading
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import close_old_connections
from django.test import Client
from django_otp.plugins.otp_totp.models import TOTPDevice

from executions.ledger.models import LedgerEntry
from sandbox_site import recovery
from sandbox_site.models import RecoveryCode
from tests.support.signing_in import LOGIN, PAGE, PASSWORD, attempt, code_of, with_authenticator

pytestmark = pytest.mark.django_db


@pytest.fixture
def ann() -> User:
    return User.objects.create_superuser("ann", password=PASSWORD)


def stated(text: str) -> int:
    return LedgerEntry.objects.filter(kind="user", statement__contains=text).count()


def codes_on(page: Any) -> list[str]:
    return re.findall(r"<li><code>([a-z2-7-]{19})</code></li>", page.content.decode())


def rested() -> None:
    TOTPDevice.objects.update(
        throttling_failure_count=0, throttling_failure_timestamp=None, last_t=-1
    )


def test_they_are_shown_once_when_an_authenticator_is_set_up(ann: User) -> None:
    client = Client()
    attempt(client)
    client.get(PAGE)
    page = client.post(PAGE, {"code": code_of(TOTPDevice.objects.get())})
    codes = codes_on(page)
    assert len(set(codes)) == recovery.CODES
    assert "no-store" in page["Cache-Control"]
    assert "messages" not in page.cookies or codes[0] not in page.cookies["messages"].value
    assert codes_on(client.get(PAGE)) == []
    stored = str(list(RecoveryCode.objects.values()))
    assert not any(code in stored or code.replace("-", "") in stored for code in codes)
    assert stated("recovery codes made") == 1
    assert codes[0] not in "".join(LedgerEntry.objects.values_list("statement", flat=True))


def test_one_stands_in_for_a_number_once(ann: User) -> None:
    codes = recovery.issue_codes(with_authenticator(ann))
    client = Client()
    answer = client.post(
        LOGIN, {"username": "ann", "password": PASSWORD, "otp_token": codes[0].upper()}, follow=True
    )
    assert f"{recovery.CODES - 1} are left" in answer.content.decode()
    assert attempt(Client(), code=codes[0]) == 200
    assert attempt(Client(), code=codes[1].replace("-", " ")) == 302
    assert stated("recovery code used") == 2


def test_one_without_the_password_or_of_somebody_else_does_not_do(ann: User) -> None:
    ben = User.objects.create_superuser("ben", password=PASSWORD)
    with_authenticator(ann)
    codes = recovery.issue_codes(with_authenticator(ben))
    assert attempt(Client(), code=codes[0]) == 200
    assert attempt(Client(), "wrong", name="ben", code=codes[0]) == 200
    assert RecoveryCode.objects.filter(used_at=None).count() == recovery.CODES


def test_wrong_ones_are_counted_like_wrong_passwords(ann: User) -> None:
    with_authenticator(ann)
    for _ in range(5):
        attempt(Client(), code="aaaa-bbbb-cccc-dddd")
    assert attempt(Client()) == 429


def test_new_ones_take_the_place_of_the_old_and_take_a_proof(ann: User) -> None:
    device = with_authenticator(ann)
    old = recovery.issue_codes(device)
    client = Client()
    assert attempt(client, code=code_of(device)) == 302
    client.post(PAGE, {"code": "000000", "new_codes": "1"})
    assert recovery.use_code(ann, old[0]) is not None
    rested()
    new = codes_on(client.post(PAGE, {"code": code_of(device), "new_codes": "1"}))
    assert len(new) == recovery.CODES
    assert recovery.use_code(ann, old[1]) is None
    assert recovery.use_code(ann, new[0]) is not None


def test_who_lost_the_authenticator_signs_in_and_removes_it(ann: User) -> None:
    codes = recovery.issue_codes(with_authenticator(ann))
    client = Client()
    attempt(client, code=codes[0])
    client.post(PAGE, {"code": codes[1]})
    assert not TOTPDevice.objects.exists()
    assert not RecoveryCode.objects.exists()
    assert stated("authenticator removed") == 1
    assert attempt(Client()) == 302


def test_under_the_two_person_rule_ones_own_authenticator_is_ones_own(
    ann: User, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    client = Client()
    attempt(client)
    client.get(PAGE)
    codes = codes_on(client.post(PAGE, {"code": code_of(TOTPDevice.objects.get())}))
    assert client.post(PAGE, {"code": codes[0]}).status_code == 302
    assert not TOTPDevice.objects.exists()
    new = {"old_password": PASSWORD, "new_password1": "n3w horse!", "new_password2": "n3w horse!"}
    assert client.post("/admin/password_change/", new).status_code == 302
    assert attempt(Client(), "n3w horse!") == 302


def test_ones_own_password_takes_the_old_one(ann: User) -> None:
    client = Client()
    attempt(client)
    answer = client.get(f"/admin/auth/user/{ann.pk}/password/")
    assert answer["Location"] == "/admin/password_change/"
    new = {"password1": "n3w horse!", "password2": "n3w horse!", "usable_password": "true"}
    client.post(f"/admin/auth/user/{ann.pk}/password/", new)
    ann.refresh_from_db()
    assert ann.check_password(PASSWORD)


def test_an_administrator_resets_one_and_the_list_shows_who_has_one(ann: User) -> None:
    ben = User.objects.create_superuser("ben", password=PASSWORD)
    recovery.issue_codes(with_authenticator(ben))
    client = Client()
    attempt(client)
    page = client.get("/admin/auth/user/").content.decode()
    assert "Authenticator" in page
    shown = {
        user.username: user.has_authenticator
        for user in client.get("/admin/auth/user/").context["cl"].result_list
    }
    assert shown == {"ann": False, "ben": True}
    chosen = {"action": "reset_authenticator", "_selected_action": [ben.pk]}
    client.post("/admin/auth/user/", chosen)
    assert not TOTPDevice.objects.exists()
    assert attempt(Client(), name="ben") == 302
    assert stated("authenticator removed") == 1


def test_the_last_administrator_is_let_in_from_the_server(ann: User) -> None:
    with_authenticator(ann)
    call_command("reset_authenticator", "ann", stdout=StringIO())
    assert attempt(Client()) == 302
    assert stated("authenticator removed") == 1
    for name in ("ann", "nobody"):
        with pytest.raises(CommandError):
            call_command("reset_authenticator", name)


@pytest.mark.django_db(transaction=True)
def test_one_used_twice_at_once_is_good_once() -> None:
    ann = User.objects.create_superuser("ann", password=PASSWORD)
    code = recovery.issue_codes(with_authenticator(ann))[0]
    barrier, used = threading.Barrier(4), []

    def use() -> None:
        barrier.wait()
        used.append(recovery.use_code(ann, code))
        close_old_connections()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([device for device in used if device is not None]) == 1

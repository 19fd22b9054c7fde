"""Signing in to the admin: guessing is held back, an authenticator is asked for where there is one."""

from __future__ import annotations

from typing import Any

import pytest
from axes.models import AccessAttempt
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django_otp.plugins.otp_totp.models import TOTPDevice

from sandbox_site.client_address import read_networks
from tests.support.signing_in import LOGIN, PAGE, PASSWORD, attempt, code_of, with_authenticator
from tests.support.signing_in import ann as ann

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


def test_a_name_is_locked_after_five_wrong_passwords_even_for_the_right_one(ann: User) -> None:
    client = Client()
    assert [attempt(client, "wrong") for _ in range(4)] == [200] * 4
    assert attempt(client, "wrong") == 429
    assert attempt(client) == 429
    assert "sessionid" not in client.cookies


def test_others_are_not_locked_out_with_it(ann: User) -> None:
    User.objects.create_superuser("ben", password=PASSWORD)
    for _ in range(5):
        attempt(Client(), "wrong")
    assert attempt(Client(), name="ben") == 302
    assert attempt(Client(), REMOTE_ADDR="192.0.2.7") == 302


def test_success_forgets_the_failures_before_it(ann: User) -> None:
    for _ in range(3):
        for _ in range(4):
            attempt(Client(), "wrong")
        assert attempt(Client()) == 302


def test_a_kept_attempt_holds_no_password_and_no_code(ann: User) -> None:
    attempt(Client(), "s3cret-guess", code="271828")
    kept = str(AccessAttempt.objects.values().get())
    assert "s3cret-guess" not in kept
    assert "271828" not in kept


def test_an_administrator_lets_a_name_in_again(ann: User, admin_client: Client) -> None:
    for _ in range(5):
        attempt(Client(), "wrong")
    pk = AccessAttempt.objects.get(username="ann").pk
    admin_client.post(f"/admin/axes/accessattempt/{pk}/delete/", {"post": "yes"})
    assert attempt(Client()) == 302


def test_an_authenticator_is_set_up_with_a_number_it_shows(ann: User) -> None:
    client = Client()
    assert attempt(client) == 302
    page = client.get(PAGE)
    assert "data:image/svg+xml;base64," in page.content.decode()
    assert "no-store" in page["Cache-Control"]
    device = TOTPDevice.objects.get(user=ann)
    client.post(PAGE, {"code": "000000"})
    assert not TOTPDevice.objects.get().confirmed
    TOTPDevice.objects.update(throttling_failure_count=0, throttling_failure_timestamp=None)
    client.post(PAGE, {"code": code_of(device)})
    assert TOTPDevice.objects.get().confirmed
    assert device.key not in client.get(PAGE).content.decode()
    assert LogEntry.objects.get().change_message == "The authenticator was set up."


def test_with_an_authenticator_the_password_alone_does_not_do(ann: User) -> None:
    device = with_authenticator(ann)
    client = Client()
    assert attempt(client) == 200
    assert client.get("/admin/").status_code == 302
    assert attempt(client, code=code_of(device)) == 302
    assert client.get("/admin/").status_code == 200


def test_a_code_is_good_only_once(ann: User) -> None:
    code = code_of(with_authenticator(ann))
    assert attempt(Client(), code=code) == 302
    assert attempt(Client(), code=code) == 200


def test_wrong_codes_are_counted_like_wrong_passwords(ann: User) -> None:
    with_authenticator(ann)
    client = Client()
    assert [attempt(client, code="000000") for _ in range(5)][-1] in (200, 429)
    assert attempt(client, code="000000") == 429


def test_a_wrong_password_and_a_missing_code_look_the_same(ann: User) -> None:
    with_authenticator(ann)
    said = []
    for password in (PASSWORD, "wrong"):
        page = Client().post(LOGIN, {"username": "ann", "password": password})
        said.append(page.context["form"].non_field_errors())
    assert said[0] == said[1]


def test_removing_it_takes_a_number(ann: User) -> None:
    device = with_authenticator(ann)
    client = Client()
    attempt(client, code=code_of(device))
    client.post(PAGE, {"code": "000000"})
    assert TOTPDevice.objects.exists()
    TOTPDevice.objects.update(
        throttling_failure_count=0, throttling_failure_timestamp=None, last_t=-1
    )
    client.post(PAGE, {"code": code_of(device)})
    assert not TOTPDevice.objects.exists()
    assert attempt(Client()) == 302


def test_the_page_is_for_the_signed_in_and_shows_nobody_elses(ann: User) -> None:
    assert Client().get(PAGE).status_code == 302
    ben = User.objects.create_user("ben", is_staff=True)
    theirs = TOTPDevice.objects.create(user=ben, name="x", confirmed=False)
    client = Client()
    client.force_login(ann)
    page = client.get(PAGE).content.decode()
    assert theirs.key not in page
    assert TOTPDevice.objects.filter(user=ann).count() == 1


@pytest.mark.parametrize(
    ("path", "lands"),
    [
        ("/admin/login/", "/admin/"),
        ("/admin/login/?next=", "/admin/"),
        ("/admin/login/?next=/admin/executions/tenant/", "/admin/executions/tenant/"),
        ("/admin/login/?next=//elsewhere.example/", "/admin/"),
        ("/admin/login/?next=https://elsewhere.example/", "/admin/"),
        ("/admin/login/?next=/admin/login/", "/admin/"),
        ("/admin/login/?next=/admin/logout/", "/admin/"),
        ("/admin/login/?next=/admin/no/such/page/", "/admin/"),
        ("/admin/login/?next=/no/such/page/", "/admin/"),
        ("/admin/login/?next=http://[", "/admin/"),
        ("/admin/login/?next=/admin/executions/execution/filters/", "/admin/"),
        (
            "/admin/login/?next=/admin/executions/session/00000000-0000-7000-8000-000000000000/close",
            "/admin/",
        ),
    ],
)
def test_signing_in_lands_on_a_page(ann: User, path: str, lands: str) -> None:
    client = Client()
    client.get(path)
    answer = client.post(path, {"username": "ann", "password": PASSWORD}, follow=True)
    assert answer.status_code == 200
    assert answer.request["PATH_INFO"] == lands
    # Who is signed in already and comes back to the login page.
    answer = client.get(path, follow=True)
    assert (answer.status_code, answer.request["PATH_INFO"]) == (200, "/admin/")


def test_signing_out_and_a_changed_password_land_on_a_page(ann: User) -> None:
    client = Client()
    attempt(client)
    new = {"old_password": PASSWORD, "new_password1": "n3w horse!", "new_password2": "n3w horse!"}
    for query in ("", "?next=//elsewhere.example/"):
        page = client.post(f"/admin/password_change/{query}", new, follow=True)
        assert page.status_code == 200
        assert page.request["PATH_INFO"] == "/admin/password_change/done/"
        new = {"old_password": "n3w horse!"} | dict.fromkeys(list(new)[1:], PASSWORD + "!")
    out = client.post("/admin/logout/?next=//elsewhere.example/", follow=True)
    assert out.status_code == 200
    assert client.get("/admin/", follow=True).request["PATH_INFO"] == "/admin/login/"


def test_behind_a_proxy_one_client_is_held_back_and_no_other(ann: User, settings: Any) -> None:
    settings.TRUSTED_PROXIES = read_networks(["127.0.0.1"])
    attacker, admin = {"HTTP_X_FORWARDED_FOR": "198.51.100.7"}, "203.0.113.9"
    for _ in range(5):
        attempt(Client(), "wrong", **attacker)
    assert attempt(Client(), **attacker) == 429
    assert attempt(Client(), HTTP_X_FORWARDED_FOR=admin) == 302


def test_a_forged_address_locks_nobody_out_and_buys_no_more_guesses(
    ann: User, settings: Any
) -> None:
    settings.TRUSTED_PROXIES = read_networks(["127.0.0.1"])
    admin = "203.0.113.9"
    said = [
        # What a proxy makes of a header that the client had sent, and a client without a proxy.
        attempt(Client(), "wrong", HTTP_X_FORWARDED_FOR=f"{admin}, 198.51.100.7")
        for _ in range(6)
    ]
    assert said[-1] == 429
    for n in range(6):
        attempt(Client(), "wrong", REMOTE_ADDR="192.0.2.7", HTTP_X_FORWARDED_FOR=f"10.9.8.{n}")
    assert attempt(Client(), REMOTE_ADDR="192.0.2.7") == 429
    assert attempt(Client(), HTTP_X_FORWARDED_FOR=admin) == 302


def test_one_ipv6_client_cannot_go_on_from_its_other_addresses(ann: User) -> None:
    for n in range(5):
        attempt(Client(), "wrong", REMOTE_ADDR=f"2001:db8::{n + 1}")
    assert attempt(Client(), REMOTE_ADDR="2001:db8::ffff") == 429
    assert attempt(Client(), REMOTE_ADDR="2001:db8:0:1::1") == 302

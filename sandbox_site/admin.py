"""Pages for what other packages bring: accounts, roles, the admin's log, login attempts."""

from __future__ import annotations

from typing import Any

import django_otp.plugins.otp_totp.admin  # noqa: F401  imported to be unregistered
import django_q.admin  # noqa: F401
from axes.admin import AccessAttemptAdmin
from axes.models import AccessAttempt, AccessFailureLog, AccessLog
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.admin import GroupAdmin, UserAdmin
from django.contrib.auth.models import Group, User
from django.http import HttpRequest
from django_otp.plugins.otp_totp.models import TOTPDevice
from django_q.models import Failure, OrmQ, Schedule, Success
from unfold.admin import ModelAdmin
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

# A schedule names any function of any module: whoever may add one runs code in the service.
# A task's page shows its arguments. Neither is for the admin.
for model in (Failure, OrmQ, Schedule, Success, AccessFailureLog, AccessLog, TOTPDevice):
    if admin.site.is_registered(model):
        admin.site.unregister(model)
for model in (AccessAttempt, Group, User):
    if admin.site.is_registered(model):
        admin.site.unregister(model)


class _ReadOnly(ModelAdmin):  # type: ignore[misc]
    """For looking at, whatever permissions somebody was given."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(User)
class ThemedUserAdmin(UserAdmin, ModelAdmin):  # type: ignore[misc, type-arg]
    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    list_display = ("username", "is_staff", "is_superuser", "is_active", "last_login")
    list_filter = ("is_staff", "is_superuser", "is_active", "groups")
    fieldsets = (
        (None, {"fields": ("username", "password")}),
        ("Person", {"fields": ("first_name", "last_name", "email")}),
        (
            "Permissions",
            {"fields": ("is_active", "is_staff", "is_superuser", "groups", "user_permissions")},
        ),
        ("Dates", {"fields": ("last_login", "date_joined")}),
    )
    readonly_fields = ("last_login", "date_joined")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        # Only a superuser makes superusers, or gives out permissions one by one.
        return (
            fields if request.user.is_superuser else (*fields, "is_superuser", "user_permissions")
        )


@admin.register(Group)
class ThemedGroupAdmin(GroupAdmin, ModelAdmin):  # type: ignore[misc]
    pass


@admin.register(LogEntry)
class LogEntryAdmin(_ReadOnly):
    list_display = ("action_time", "user", "content_type", "object_repr", "message")
    list_filter = ("action_flag", "content_type")
    list_select_related = ("user", "content_type")
    search_fields = ("object_repr", "change_message", "user__username")
    fields = readonly_fields = (
        "action_time",
        "user",
        "content_type",
        "object_id",
        "object_repr",
        "message",
    )
    show_full_result_count = False

    @admin.display(description="what")
    def message(self, entry: LogEntry) -> str:
        return entry.get_change_message() or entry.get_action_flag_display()


@admin.register(AccessAttempt)
class ThemedAccessAttemptAdmin(AccessAttemptAdmin, ModelAdmin):  # type: ignore[misc]
    """Failed logins. Deleting one lets its name and address try again at once."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

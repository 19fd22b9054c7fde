"""Pages for what other packages bring: accounts, roles, the admin's log, login attempts."""

from __future__ import annotations

from typing import Any

import django_otp.plugins.otp_totp.admin  # noqa: F401  imported to be unregistered
import django_q.admin  # noqa: F401
from axes.admin import AccessAttemptAdmin
from axes.models import AccessAttempt, AccessFailureLog, AccessLog
from django.contrib import admin, messages
from django.contrib.admin.models import ACTION_FLAG_CHOICES, LogEntry
from django.contrib.auth.admin import GroupAdmin, UserAdmin
from django.contrib.auth.models import Group, User
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Exists, OuterRef, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.safestring import SafeString
from django_otp.plugins.otp_totp.models import TOTPDevice
from django_q.models import Failure, OrmQ, Schedule, Success
from unfold.admin import ModelAdmin
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from executions.kernel.database import delete_in_batches
from providers.admin_lists import ChoiceField, Condition, KeysetAdmin, ListField, MomentField
from providers.admin_pages import GuardedAdmin
from providers.services.approvers import persons_behind
from providers.timestamps import NOTHING, shown_moment
from sandbox_site.accounts import authenticator_of, why_not_remove, why_not_unlock

admin.site.empty_value_display = NOTHING

# What Django calls a group is a role here. Migrations know it by its own name.
Group._meta.verbose_name, Group._meta.verbose_name_plural = "role", "roles"
User._meta.get_field("groups").verbose_name = "roles"
LogEntry._meta.verbose_name, LogEntry._meta.verbose_name_plural = "admin action", "admin actions"

# A schedule names any function of any module: whoever may add one runs code in the service.
# A task's page shows its arguments. Neither is for the admin.
for model in (Failure, OrmQ, Schedule, Success, AccessFailureLog, AccessLog, TOTPDevice):
    if admin.site.is_registered(model):
        admin.site.unregister(model)
for model in (AccessAttempt, Group, User):
    if admin.site.is_registered(model):
        admin.site.unregister(model)


class _ReadOnly(ModelAdmin):  # type: ignore[misc]
    """Read-only, whatever permissions a user has."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


def _may_manage(request: HttpRequest, user: Any) -> bool:
    """The page only spares a refusal: `sandbox_site.accounts` is asked about every change."""
    return user is None or not user.is_superuser or request.user.is_superuser


class AccountForm(UserChangeForm):  # type: ignore[misc]
    """Let an account with a role sign in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "groups" in self.fields:
            roles = self.fields["groups"]
            roles.help_text = "Permissions of the account. An account with a role can sign in."
        if "is_staff" in self.fields:
            self.fields["is_staff"].help_text = (
                "Can sign in here. An account with a role always can; deactivate it to prevent "
                "that."
            )

    def clean(self) -> Any:
        cleaned = super().clean()
        if self.cleaned_data.get("groups"):
            self.cleaned_data["is_staff"] = True
        return cleaned


@admin.register(User)
class ThemedUserAdmin(GuardedAdmin, UserAdmin, ModelAdmin):  # type: ignore[misc, type-arg]
    form = AccountForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    list_display = (
        "username",
        "roles",
        "is_superuser",
        "is_staff",
        "is_active",
        "authenticator",
        "last_login",
    )
    actions = ("reset_authenticator",)
    list_filter = ("is_staff", "is_superuser", "is_active", "groups")
    fieldsets = (
        (None, {"fields": ("username", "password")}),
        ("Person", {"fields": ("first_name", "last_name", "email")}),
        (
            "Permissions",
            {"fields": ("is_active", "is_staff", "is_superuser", "groups", "user_permissions")},
        ),
        ("Two-person approval", {"fields": ("one_person_with",)}),
        ("Dates", {"fields": ("last_login", "date_joined")}),
    )
    readonly_fields = ("one_person_with", "last_login", "date_joined")

    def get_queryset(self, request: HttpRequest) -> Any:
        devices = TOTPDevice.objects.filter(user_id=OuterRef("pk"), confirmed=True)
        accounts = super().get_queryset(request).annotate(has_authenticator=Exists(devices))
        return accounts.prefetch_related("groups")

    @admin.display(description="roles")
    def roles(self, user: Any) -> str:
        return ", ".join(sorted(group.name for group in user.groups.all())) or "-"

    @admin.display(description="authenticator", boolean=True, ordering="has_authenticator")
    def authenticator(self, user: Any) -> bool:
        return bool(user.has_authenticator)

    @admin.display(description="counts as the same person as")
    def one_person_with(self, user: Any) -> str:
        """Whoever made the account or let it in: the two do not count as two persons."""
        if not hasattr(user, "_others"):
            user._others = persons_behind(user.pk) - {user.pk}
        names = User.objects.filter(pk__in=user._others).values_list("username", flat=True)
        return ", ".join(sorted(names)) if user._others else "–"

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and _may_manage(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and _may_manage(request, obj)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        user = self.get_object(request, object_id)
        if user is None or not (why := why_not_remove(user.pk)):
            return super().delete_view(request, object_id, extra_context)
        if not self.has_delete_permission(request, user):
            raise PermissionDenied
        answer: HttpResponse = self.guarded_view(request, lambda: self._keep(request, user, why))
        return answer

    def _keep(self, request: HttpRequest, user: User, why: str) -> HttpResponse:
        """In the place of the deletion: what can be done instead, and that."""
        may_deactivate = user.is_active and self.has_change_permission(request, user)
        if may_deactivate and "_deactivate" in request.POST:
            user.is_active = False
            user.save(update_fields=["is_active"])
            self.log_change(request, user, "Deactivated.")
            self.message_user(request, f"{user} was deactivated.", messages.SUCCESS)
            return HttpResponseRedirect(reverse("admin:auth_user_changelist"))
        context = {
            **self.admin_site.each_context(request),
            "opts": self.model._meta,
            "title": f"Delete {user}?",
            "account": user,
            "why": why,
            "may_deactivate": may_deactivate,
        }
        return TemplateResponse(request, "admin/auth/user/kept.html", context)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        shown, counts, lacking, protected = super().get_deleted_objects(objs, request)
        kept = [str(user) for user in objs if why_not_remove(user.pk)]
        if kept:
            lacking = {f"log entries of {', '.join(kept)}, which are kept: deactivate the account"}
        return shown, counts, lacking, protected

    def user_change_password(
        self,
        request: HttpRequest,
        id: str,  # noqa: A002  the name that its address gives it
        form_url: str = "",
    ) -> HttpResponse:
        # One's own takes the old one, so that a session left open is not enough.
        if id == str(request.user.pk):
            return HttpResponseRedirect(reverse("admin:password_change"))
        view = super().user_change_password
        answer: HttpResponse = self.guarded_view(request, lambda: view(request, id, form_url))
        return answer

    @admin.action(description="Reset the authenticator", permissions=["change"])
    def reset_authenticator(self, request: HttpRequest, users: QuerySet[User]) -> None:
        """So that somebody who lost it signs in with the password and sets up another."""
        reset = 0
        for user in users:
            if (device := authenticator_of(user)) is not None:
                device.delete()
                self.log_change(request, user, "Authenticator reset.")
                reset += 1
        told = messages.SUCCESS if reset else messages.WARNING
        self.message_user(request, f"Authenticators reset: {reset}.", told)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        # Only a superuser makes superusers, or gives out permissions one by one.
        return (
            fields if request.user.is_superuser else (*fields, "is_superuser", "user_permissions")
        )


@admin.register(Group)
class ThemedGroupAdmin(GuardedAdmin, GroupAdmin, ModelAdmin):  # type: ignore[misc]
    list_display = ("name", "accounts")

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).annotate(number=Count("user"))

    @admin.display(description="accounts", ordering="number")
    def accounts(self, role: Any) -> int:
        return int(role.number)


class LogFrom(MomentField):
    title = "from"
    parameter_name = "action_time__gte"
    column = "action_time"


class LogUntil(LogFrom):
    title = "before"
    parameter_name = "action_time__lt"
    is_end = True


class LogUser(ListField):
    title = "user"
    parameter_name = "user"
    column = "user__username"
    index = "found"


class LogAction(ChoiceField):
    title = "action"
    parameter_name = column = "action_flag"
    offered = ACTION_FLAG_CHOICES

    def condition(self, text: str) -> Condition:
        if text not in dict(self.values()):
            raise ValueError("Must be one of the choices.")
        return super().condition(text)


@admin.register(LogEntry)
class LogEntryAdmin(KeysetAdmin, _ReadOnly):
    list_display = ("shown_time", "user", "content_type", "object_repr", "message")
    list_filter = (LogFrom, LogUntil, LogUser, LogAction)
    ordering = ("-id",)
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

    @admin.display(description="time")
    def shown_time(self, entry: LogEntry) -> SafeString | str:
        return shown_moment(entry.action_time)

    @admin.display(description="action")
    def message(self, entry: LogEntry) -> str:
        return entry.get_change_message() or entry.get_action_flag_display()


@admin.register(AccessAttempt)
class ThemedAccessAttemptAdmin(AccessAttemptAdmin, ModelAdmin):  # type: ignore[misc]
    """Failed logins. Deleting one lets its name and address try again at once.

    Nobody lets guessing go on at an account that may do more than she.
    """

    # Without the package's own `cleanup_expired_attempts`: one statement over all rows, whose
    # number strangers decide, for any account, whatever was selected.
    actions = ()

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        allowed: bool = super().has_delete_permission(request, obj)
        return allowed and (obj is None or not why_not_unlock(request.user, obj.username))

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[AccessAttempt]) -> None:
        for name in queryset.values_list("username", flat=True):
            if why := why_not_unlock(request.user, name or ""):
                raise PermissionDenied(why)
        # Strangers decide how many there are.
        delete_in_batches(queryset)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

"""The versions of configurations: read, compared, restored; never changed."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString

from providers import guarded
from providers.admin.pages import (
    ConfigVersionModelAdmin,
    account_of,
    author_of,
    diff_table,
    subject_name,
)
from providers.admin_lists import KeysetAdmin, ListField, MomentField
from providers.admin_pages import ReadOnly, only_visible
from providers.errors import InvalidConfiguration
from providers.hidden_characters import visible
from providers.models import ConfigVersion, PendingChange
from providers.services import ConfigurationConflict, history, request_rollback
from providers.services.guarded_rows import NotAllowed, restore
from providers.timestamps import shown_moment

_CHANGE = "providers.change_providerconfig"


def may_restore(request: HttpRequest, subject: str) -> bool:
    """Whether this person may change what a version is of."""
    if not guarded.is_row(subject):
        return request.user.has_perm(_CHANGE)
    app, model = subject.partition(":")[0].split(".")
    needed = [f"{app}.{verb}_{model}" for verb in ("add", "change")]
    return request.user.has_perms(needed)


def _restore(request: HttpRequest, version: ConfigVersion, reason: str) -> bool:
    """Whether it waits for a second person now."""
    if guarded.is_row(version.subject):
        return bool(restore(request.user, version, reason=reason))
    change = request_rollback(
        version, author=author_of(request), author_id=account_of(request), reason=reason
    )
    return isinstance(change, PendingChange)


class AuthorField(ListField):
    title = "author"
    parameter_name = column = "author"
    hint = "user:name"


class SubjectField(ListField):
    title = "subject (id)"
    parameter_name = column = "subject"
    # Few of one subject, in an index by subject and version.
    index = "found"


class FromField(MomentField):
    title = "from"
    parameter_name = "created_at__gte"
    column = "created_at"


class UntilField(FromField):
    title = "before"
    parameter_name = "created_at__lt"
    is_end = True


@admin.register(ConfigVersion)
class ConfigVersionAdmin(ReadOnly, KeysetAdmin, ConfigVersionModelAdmin):
    list_display = ("name", "shown_created", "author", "approved_by", "reason", "changes")
    list_display_links = ("name",)
    list_filter = (FromField, UntilField, AuthorField, SubjectField)
    ordering = ("-id",)
    search_fields = ("subject", "shown_as", "author", "reason")
    actions = ("compare_selected",)
    change_form_template = "admin/providers/configversion/change_form.html"
    fields = readonly_fields = (
        "name",
        "created_at",
        "author",
        "approved_by",
        "reason",
        "content_hash",
        "difference",
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[ConfigVersion]:
        return only_visible(request, super().get_queryset(request).defer("content"))

    @admin.display(description="version")
    def name(self, version: ConfigVersion) -> str:
        between = ", version " if guarded.is_row(version.subject) else " "
        name = subject_name(version.subject, version.shown_as)
        return f"{name[:1].upper()}{name[1:]}{between}{version.version}"

    @admin.display(description="created at")
    def shown_created(self, version: ConfigVersion) -> SafeString | str:
        return shown_moment(version.created_at)

    @admin.display(description="changes")
    def changes(self, version: ConfigVersion) -> str:
        return visible(history.summary(version.diff))

    @admin.display(description="changes")
    def difference(self, version: ConfigVersion) -> SafeString:
        return diff_table(version.diff)

    @admin.action(description="Compare the two selected versions", permissions=["view"])
    def compare_selected(
        self, request: HttpRequest, versions: QuerySet[ConfigVersion]
    ) -> HttpResponse | None:
        chosen = list(versions.order_by("version").values_list("pk", flat=True)[:3])
        if len(chosen) != 2:
            self.message_user(request, "Select two versions to compare.", messages.ERROR)
            return None
        return HttpResponseRedirect(reverse("admin:providers_compare", args=chosen))

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        return [
            path("compare/<int:old>/<int:new>/", wrap(self.compare_view), name="providers_compare"),
            path("<int:pk>/restore/", wrap(self.restore_view), name="providers_restore"),
            *super().get_urls(),
        ]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        version = self.get_object(request, object_id)
        if version is None:
            raise Http404
        versions = ConfigVersion.objects.filter(subject=version.subject)
        earlier = versions.filter(version__lt=version.version)
        is_current = not versions.filter(version__gt=version.version).exists()
        context = {
            "earlier": earlier.order_by("-version").defer("content")[:20],
            "is_current": is_current,
            "may_restore": may_restore(request, version.subject),
            "version": version,
        }
        return super().change_view(
            request, object_id, form_url, {**(extra_context or {}), **context}
        )

    def compare_view(self, request: HttpRequest, old: int, new: int) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        found = self.get_queryset(request).in_bulk([old, new])
        if len(found) != len({old, new}):
            raise Http404
        try:
            diff = history.compare_versions(found[old], found[new])
        except InvalidConfiguration as error:
            self.message_user(request, error.message, messages.ERROR)
            return HttpResponseRedirect(reverse("admin:providers_configversion_changelist"))
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": f"{self.name(found[old])} and {found[new].version}",
            "old": found[old],
            "new": found[new],
            "diff": diff_table(diff),
        }
        return TemplateResponse(request, "admin/providers/configversion/compare.html", context)

    def restore_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        version = self.get_queryset(request).filter(pk=pk).first()
        if not may_restore(request, version.subject if version else ""):
            raise PermissionDenied
        if version is None:
            raise Http404
        back = HttpResponseRedirect(reverse("admin:providers_configversion_change", args=[pk]))
        # Where somebody lands whose session had ended when she pressed the button.
        if request.method != "POST":
            return back
        reason = request.POST.get("reason", "").replace("\0", "")[:500]
        try:
            waits = _restore(request, version, reason)
        except (InvalidConfiguration, ConfigurationConflict, NotAllowed) as error:
            self.message_user(request, f"Not restored. {error}", messages.ERROR)
            return back
        done = "Requested restore" if waits else "Restored"
        self.log_change(request, version, f"{done} version {version.version}.")
        if waits:
            self.message_user(
                request, "Change submitted for approval (Pending changes).", messages.WARNING
            )
        else:
            self.message_user(request, f"{self.name(version)} was restored.", messages.SUCCESS)
        return back

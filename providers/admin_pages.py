"""Bases of admin pages: rows that nobody changes, rows whose writes are versions, and choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from django import forms
from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.contrib.messages.storage import default_storage
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from unfold.widgets import UnfoldAdminSelectWidget

from providers import guarded
from providers.models import ConfigVersion, PendingChange
from providers.services import two_person_rule
from providers.services.guarded_rows import NotAllowed, carry_out


class ReadOnly:
    """Rows that nobody adds, changes or removes in the admin, whatever their permissions."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


if TYPE_CHECKING:
    from django.contrib import admin

    _Admin = admin.ModelAdmin[Any]
else:
    _Admin = object


class SaysWhatHappens(_Admin):
    """Mix it in before the admin class, and say in `consequences` what follows from a deletion."""

    delete_confirmation_template = "admin/delete_with_consequences.html"

    def consequences(self, row: Any) -> list[str]:
        """Sentences for whoever is about to delete this row; none where nothing follows."""
        return []

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        row = self.get_object(request, object_id) if request.method == "GET" else None
        # Who may not delete it is refused, and told nothing.
        told = row is not None and self.has_delete_permission(request, row)
        context = {"consequences": self.consequences(row) if told else [], **(extra_context or {})}
        answer: HttpResponse = super().delete_view(request, object_id, context)
        return answer


WAITS = "Change submitted for approval (Pending changes)."
_SHOWN = 10


class GuardedAdmin(SaysWhatHappens, _Admin):
    """Mix it in before the admin class of a guarded model.

    The page does what it does; what it made of guarded rows is then kept as versions, or undone
    and left waiting. So whatever a form, an inline, an action or a later page writes is covered.
    """

    change_form_outer_before_template = "admin/guarded/notice.html"
    change_form_after_template = "admin/guarded/reason.html"
    change_form_outer_after_template = "admin/guarded/versions.html"

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        context = {**(extra_context or {}), **_about(self.model, object_id)}
        view = super().changeform_view
        return self.guarded_view(request, lambda: view(request, object_id, form_url, context))

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        view = super().delete_view
        answer: HttpResponse = self.guarded_view(
            request, lambda: view(request, object_id, extra_context)
        )
        return answer

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if self._is_beyond_a_page(request):
            messages.error(
                request,
                "Nothing was changed. The selection is too large for one transaction: "
                f"select at most one page ({self.list_per_page} rows).",
            )
            return self._back()
        view = super().changelist_view
        answer: HttpResponse = self.guarded_view(request, lambda: view(request, extra_context))
        return answer

    def _is_beyond_a_page(self, request: HttpRequest) -> bool:
        """Whether an action is asked for over more rows than a page has."""
        if request.method != "POST" or request.POST.get("select_across", "0") == "0":
            return False
        return self.get_queryset(request).count() > self.list_per_page

    def guarded_view(self, request: HttpRequest, view: Callable[[], Any]) -> Any:
        """Answer as `view` does, unless what it did has to wait for a second person."""
        if request.method != "POST":
            return view()
        # What the view says was done is not true if it is undone.
        said, request._messages = request._messages, default_storage(request)  # type: ignore[attr-defined]
        session_key = request.session.session_key
        try:
            answer, waiting = carry_out(
                request.user, view, reason=request.POST.get("_reason", "").replace("\0", "")[:500]
            )
        except NotAllowed as refused:
            _keep_session(request, session_key)
            request._messages = said  # type: ignore[attr-defined]
            messages.error(request, f"Nothing was changed. {refused}")
            log_request(request, self.model, "Refused.", str(refused))
            return self._back()
        if not waiting:
            return answer
        _keep_session(request, session_key)
        request._messages = said  # type: ignore[attr-defined]
        for change in waiting:
            log_request(request, PendingChange, f"Requested: {change}.", str(change), change.pk)
            messages.warning(request, f"{change}: {WAITS}")
        return self._back()

    def _back(self) -> HttpResponseRedirect:
        options = self.model._meta
        return HttpResponseRedirect(
            reverse(f"admin:{options.app_label}_{options.model_name}_changelist")
        )


def _keep_session(request: HttpRequest, key: str | None) -> None:
    """A view that sets a password gives the session another key, which is undone with the rest."""
    if request.session.session_key != key:
        request.session._session_key = key
        request.session.modified = False


def log_request(
    request: HttpRequest, model: Any, message: str, shown_as: str, pk: int | None = None
) -> None:
    """Note in the admin's log what somebody asked for, or was refused."""
    LogEntry.objects.create(
        user_id=int(request.user.pk or 0),
        content_type_id=ContentType.objects.get_for_model(model).pk,
        object_id=None if pk is None else str(pk),
        object_repr=shown_as[:200],
        action_flag=CHANGE,
        change_message=message,
    )


def only_visible(
    request: HttpRequest, rows: QuerySet[Any], permission: str = "view"
) -> QuerySet[Any]:
    """Of versions or waiting changes those of what this person may see on its own page."""
    for kind in guarded.all_guarded():
        app, model = kind.label.split(".")
        if not request.user.has_perm(f"{app}.{permission}_{model}"):
            rows = rows.exclude(subject__startswith=f"{kind.label}:")
    return rows


def _about(model: Any, object_id: str | None) -> dict[str, Any]:
    subject = f"{model._meta.label_lower}:{object_id or ''}"
    about: dict[str, Any] = {"two_person_rule": two_person_rule(), "versions": [], "waiting": []}
    if object_id:
        versions = ConfigVersion.objects.filter(subject=subject).defer("content")
        about["versions"] = versions.order_by("-version")[:_SHOWN]
        waiting = PendingChange.objects.filter(subject=subject, status="waiting").defer("config")
        about["waiting"] = waiting[:_SHOWN]
    return about


T = TypeVar("T")


def once(request: HttpRequest, name: str, load: Callable[[], T]) -> T:
    """What `load` returns, once for a request: a form is made several times for a page."""
    known: dict[str, Any] = request.__dict__.setdefault("_looked_up", {})
    if name not in known:
        known[name] = load()
    return cast("T", known[name])


def choice(
    field: Any, known: Iterable[str], empty: str = "", stored: str = ""
) -> forms.ChoiceField:
    """The form field of a text as a list of what is known; `empty` says what no choice means.

    What is stored is offered also where it is known no more: a row is not refused for a column that
    nobody changed.
    """
    choices = [(name, name) for name in sorted(known)]
    if stored and stored not in dict(choices):
        choices.append((stored, f"{stored} (no longer exists)"))
    return forms.ChoiceField(
        choices=[("", empty or "Choose"), *choices],
        required=field.required,
        label=field.label,
        help_text=field.help_text,
        widget=UnfoldAdminSelectWidget,
    )

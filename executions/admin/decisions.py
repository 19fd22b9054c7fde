"""Pages on which a person approves or rejects what code wants to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path
from unfold.admin import ModelAdmin

from executions.capabilities.policies.approvals import DECIDE, AlreadyDecided, AskedBySame
from providers.admin_pages import ReadOnly

VIEW_EXECUTION = "executions.view_execution"

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = ModelAdmin


class DecidedByHand(ReadOnly, _ModelAdmin):
    """Rows of executions; what is decided about one is bound to a hash of what was shown."""

    show_full_result_count = False
    # The column of that hash, and those of the execution that the pages need.
    hash_field: ClassVar[str]
    of_execution: ClassVar[tuple[str, ...]]

    def shown(self, row: Any) -> dict[str, Any]:
        """What the page's template shows of it, to those who may see code."""
        raise NotImplementedError

    def decide(self, row: Any, person: Any, *, approve: bool, shown_hash: str) -> str:
        """Carry it out. Returns what to say; raises AlreadyDecided and AskedBySame."""
        raise NotImplementedError

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = super().get_queryset(request).select_related("execution")
        return rows.only(
            *(field.attname for field in self.opts.concrete_fields),
            *(f"execution__{name}" for name in self.of_execution),
        )

    def get_urls(self) -> list[URLPattern]:
        page = self.admin_site.admin_view(self.decide_view)
        name = f"{self.opts.app_label}_{self.opts.model_name}_decide"
        return [path("<path:pk>/decide/", page, name=name), *super().get_urls()]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        row = self.get_object(request, object_id)
        may_decide = request.user.has_perm(DECIDE)
        context = {**(extra_context or {}), "may_decide": may_decide}
        if row is not None and (may_decide or request.user.has_perm(VIEW_EXECUTION)):
            context |= {"hash_field": self.hash_field, "shown_hash": getattr(row, self.hash_field)}
            context |= self.shown(row)
        return super().change_view(request, object_id, form_url, context)

    def decide_view(self, request: HttpRequest, pk: str) -> HttpResponse:
        if request.method != "POST" or not self.has_view_permission(request):
            raise PermissionDenied
        row = self.get_object(request, pk)
        if row is None:
            raise Http404
        approve = "approve" in request.POST
        shown_hash = request.POST.get(self.hash_field, "")
        try:
            said = self.decide(row, request.user, approve=approve, shown_hash=shown_hash)
        except (AlreadyDecided, AskedBySame) as error:
            messages.error(request, error.message)
        else:
            messages.success(request, said)
        return redirect(f"admin:{self.opts.app_label}_{self.opts.model_name}_change", pk)

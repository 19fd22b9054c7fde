"""Saying on the page that asks whether to delete something what will happen then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, HttpResponse

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

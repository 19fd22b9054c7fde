"""Lists that are paged by key: as long as they may be, each page with a link that stays true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from django.contrib.admin.views.main import ERROR_FLAG, SEARCH_VAR, ChangeList
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet, UUIDField
from django.forms import Media
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from providers.admin.list_fields import ListField
from providers.admin.sifting import MOST, Condition, Page, Place, find

if TYPE_CHECKING:
    from django.contrib import admin

    _Admin = admin.ModelAdmin[Any]
else:
    _Admin = object

NEXT, PREVIOUS, FROM, ORDER = "next", "previous", "from", "order"
OLDEST = "oldest"
_OURS = (NEXT, PREVIOUS, FROM, ORDER)
_IGNORED = (*_OURS, "p", "all", ERROR_FLAG, "_popup", "_to_field", "_facets", "o")
_LONGEST_SEARCH = 1000
_LARGEST = 2**63


class KeysetList(ChangeList):
    """One page. `problems` is what is wrong with the address: then no row is shown."""

    problems: list[str]
    notes: list[str]
    page: Page
    links: dict[str, str]
    _descending: bool

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        """The rows of every page."""
        given = {name: list(values) for name, values in request.GET.lists()}
        for name in _IGNORED:
            given.pop(name, None)
        # Not as the base class has read it, which takes what it cannot read for nothing.
        self.query = "".join(given.pop(SEARCH_VAR, [])[-1:]).strip()
        self.filter_params = {
            name: values
            for name, values in request.GET.lists()
            if name not in _IGNORED and any(values)
        }
        declared = cast("Sequence[type[ListField]]", self.list_filter)
        fields = [field(request, given, self.model, self.model_admin) for field in declared]
        self.filter_specs = [*fields]
        # The theme's own panel of links is not drawn; ours is a form.
        self.has_filters = False
        self.has_active_filters = any(field.text for field in fields)
        self.problems = [field.error for field in fields if field.error]
        self.problems += [f"Unknown filter {name[:60]!r}." for name in sorted(given)]
        self.notes = []
        self.conditions = [each for field in fields for each in field.conditions]
        self._search()
        rows = self.root_queryset.filter(*(condition.q for condition in self.conditions))
        return self.apply_select_related(rows) if not self.problems else rows.none()

    def _search(self) -> None:
        if not self.query:
            return
        if len(self.query) > _LONGEST_SEARCH or "\0" in self.query:
            self.problems.append(f"Search: At most {_LONGEST_SEARCH} characters, without NUL.")
            return
        searched = cast("KeysetAdmin", self.model_admin)
        found = searched.search(self.query)
        if isinstance(found, str):
            self.problems.append(f"Search: {found}")
        else:
            self.conditions.append(found)
            self.notes += searched.search_notes(self.query)

    def get_results(self, request: HttpRequest) -> None:
        self.is_oldest_first = request.GET.get(ORDER) == OLDEST
        is_back = PREVIOUS in request.GET
        place = self._place(request, is_back)
        if self.problems:
            self.page = Page([], has_more=False, count=0, is_exact=True)
        else:
            self.page = find(
                self.root_queryset, self.queryset, self.conditions, place, self.list_per_page
            )
        rows = self.page.rows[::-1] if is_back else self.page.rows
        self.result_list = rows
        self.result_count = self.page.count
        # Equal, so that the theme does not tell a number above that may be cut.
        self.full_result_count = self.result_count
        self.show_full_result_count = False
        self.show_admin_actions = True
        self.can_show_all = self.multi_page = False
        self.paginator = Paginator(rows, self.list_per_page)
        self.links = self._links(rows, is_back, place)

    def _place(self, request: HttpRequest, is_back: bool) -> Place:
        descending = self._descending = self.is_oldest_first == is_back
        given = [name for name in (PREVIOUS, NEXT, FROM) if name in request.GET]
        if not given:
            return Place(descending=descending)
        text = request.GET[given[0]]
        try:
            key = self.opts.pk.to_python(text)
            if not isinstance(self.opts.pk, UUIDField) and not 0 <= key < _LARGEST:
                raise ValidationError("out of range")
        except (ValidationError, ValueError):
            self.problems.append(f"{given[0]}: Must be the key of a row.")
            return Place(descending=descending)
        return Place(key, given[0] == FROM, descending)

    def _links(self, rows: list[Any], is_back: bool, place: Place) -> dict[str, str]:
        """The address of each way from here; none where it leads nowhere."""
        links = {"turned": self._link(**({} if self.is_oldest_first else {ORDER: OLDEST}))}
        if place.key is not None:
            links["first"] = self._link(**self._order())
        if not rows:
            if self.page.last is not None:
                links["further"] = self._at(PREVIOUS if is_back else NEXT, self.page.last)
            return links
        more_ahead, more_behind = self.page.has_more, place.key is not None
        if is_back:
            more_ahead, more_behind = True, self.page.has_more
        if more_ahead:
            links[NEXT] = self._at(NEXT, rows[-1].pk)
        if more_behind:
            links[PREVIOUS] = self._at(PREVIOUS, rows[0].pk)
        if self.page.last is not None:
            links["further"] = self._at(PREVIOUS if is_back else NEXT, self.page.last)
        links["here"] = self._at(FROM, rows[0].pk)
        return links

    def _order(self) -> dict[str, str]:
        return {ORDER: OLDEST} if self.is_oldest_first else {}

    def _at(self, way: str, key: Any) -> str:
        return self._link(**self._order(), **{way: str(key)})

    def _link(self, **ours: str) -> str:
        given: dict[str, Any] = dict(self.filter_params)
        return "?" + urlencode(sorted((given | ours).items()), doseq=True)

    @property
    def count_in_words(self) -> str:
        """How many rows match, as far as they are counted."""
        page = self.page
        if page.count > MOST:
            return f"{MOST:,}+"
        if page.is_exact:
            return f"{page.count:,}"
        return f"at least {page.count:,}"

    @property
    def cut(self) -> str:
        """What was left out, where not everything was looked at."""
        if self.page.last is None:
            return ""
        way = "older" if self._descending else "newer"
        return (
            f"{self.page.looked_at:,} {self.opts.verbose_name_plural} searched; {way} ones not yet."
        )

    @property
    def said(self) -> list[str]:
        """Every filter that is set, in words."""
        fields = cast("list[ListField]", self.filter_specs)
        return [field.said for field in fields if field.said]


class KeysetAdmin(_Admin):
    """Mix it in before an admin class. `list_filter` holds ListFields."""

    change_list_template = "admin/keyset_list.html"
    show_full_result_count = False
    sortable_by = ()
    list_per_page = 50

    @property
    def media(self) -> Media:
        return super().media + Media(css={"all": ("admin_ui/lists.css",)})

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return KeysetList

    def search(self, text: str) -> Condition | str:
        """What such a search asks for, or what the text must be instead."""
        q = Q()
        for name in self.search_fields:
            q |= Q(**{f"{name}__icontains": text})
        return Condition(q)

    def search_notes(self, text: str) -> list[str]:
        """What has to be said beside what was found."""
        return []

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        answer = super().changelist_view(request, extra_context)
        if isinstance(answer, TemplateResponse) and answer.context_data is not None:
            changelist = answer.context_data.get("cl")
            if changelist is not None and changelist.problems:
                answer.status_code = 400
        return answer

"""The filter `moment`: a time as all pages show it."""

from __future__ import annotations

from django import template

from providers.timestamps import shown_moment

register = template.Library()
register.filter("moment", shown_moment)

"""The admin form of a provider, made from what the provider declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from django import forms
from django.utils.html import escape
from django.views.decorators.debug import sensitive_variables
from unfold.widgets import (
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminPasswordWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from providers import registry
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration
from providers.models import ProviderConfig
from providers.schema import ConfigField, mask
from providers.services import merged_config, stored_config

if TYPE_CHECKING:
    _ModelForm = forms.ModelForm[ProviderConfig]
else:
    _ModelForm = forms.ModelForm

VERSION = "_version"
REASON = "_reason"
CLEAR = "_clear_"


class ProviderConfigForm(_ModelForm):
    """The part that all providers share; `build_form` adds one field for each they declare.

    Names with a leading underscore are ours: no provider can declare one.
    """

    provider: type[SandboxProvider]
    provider_id: str

    _version = forms.IntegerField(widget=forms.HiddenInput)
    _reason = forms.CharField(
        label="Reason",
        required=False,
        max_length=500,
        help_text="Stored with the new version.",
        widget=UnfoldAdminTextInputWidget(),
    )

    class Meta:
        model = ProviderConfig
        fields: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.instance.provider_id = self.provider_id
        # A row that is still to be made has version 1 by default; none stored yet is version 0.
        self.initial[VERSION] = 0 if self.instance._state.adding else self.instance.version

    @property
    def config(self) -> dict[str, Any]:
        """What was entered, unset fields left out. An untouched secret is unset."""
        entered = {key: self.cleaned_data.get(key) for key in self.provider.config_fields}
        return {key: value for key, value in entered.items() if value not in (None, "")}

    @property
    def cleared(self) -> list[str]:
        """The secrets that were ticked for removal, unless a new one was entered too."""
        fields = self.provider.config_fields
        ticked = [key for key in fields if self.cleaned_data.get(CLEAR + key)]
        return [key for key in ticked if not self.cleaned_data.get(key)]

    @sensitive_variables()
    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        row = None if self.instance._state.adding else self.instance
        if row is not None and cleaned.get(VERSION) != row.version:
            self.add_error(
                None,
                "Another user changed the configuration in the meantime. Nothing was saved. Reload "
                "the page and make your change again.",
            )
            return cleaned
        try:
            merged_config(self.provider, self.config, stored_config(row) or {}, self.cleared)
        except InvalidConfiguration as error:
            self._show(error)
        return cleaned

    def _show(self, error: InvalidConfiguration) -> None:
        for key, message in error.errors.items():
            if key not in self.fields:
                self.add_error(None, f"{key}: {message}")
            elif not self.has_error(key):
                self.add_error(key, message)
        if not error.errors:
            self.add_error(None, error.message)


def build_form(provider_id: str, stored: Mapping[str, Any] | None) -> type[ProviderConfigForm]:
    """A form class for a configuration, showing `stored`, or defaults when nothing is stored.

    Secrets never reach the page: only their mask does.
    """
    provider = registry.get(provider_id)
    attributes: dict[str, Any] = {"__module__": __name__}
    for key, declared in provider.config_fields.items():
        value = (stored or {}).get(key)
        if declared.secret:
            attributes |= _secret_fields(key, declared, value)
        else:
            initial = declared.default if stored is None or value is None else value
            attributes[key] = _form_field(declared, initial)
    form = cast(
        "type[ProviderConfigForm]", type("ProviderConfigForm", (ProviderConfigForm,), attributes)
    )
    form.provider, form.provider_id = provider, provider_id
    # What is asked of every provider comes last.
    form.base_fields[REASON] = form.base_fields.pop(REASON)
    return form


def _form_field(declared: ConfigField, initial: Any) -> forms.Field:
    common: dict[str, Any] = {
        "label": declared.label,
        "help_text": escape(
            " ".join(filter(None, (declared.description, _range(declared), _anew(declared))))
        ),
        "initial": initial,
        "required": declared.required,
    }
    hint = {"placeholder": declared.placeholder} if declared.placeholder else {}
    if declared.type == "boolean":
        return forms.BooleanField(
            **(common | {"required": False}), widget=UnfoldBooleanSwitchWidget()
        )
    if declared.options:
        choices = [(option, option) for option in declared.options]
        if initial not in declared.options or not declared.required:
            choices.insert(0, ("", "---------"))
        return forms.ChoiceField(**common, choices=choices, widget=UnfoldAdminSelectWidget())
    if declared.type == "string":
        is_long = declared.multiline or declared.several
        widget = UnfoldAdminTextareaWidget if is_long else UnfoldAdminTextInputWidget
        rows = {"rows": "3"} if declared.several else {}
        return forms.CharField(
            **common,
            min_length=_whole(declared.min),
            max_length=_whole(declared.max),
            widget=widget(attrs=hint | rows),
        )
    number = forms.IntegerField if declared.type == "integer" else forms.FloatField
    bounds: dict[str, Any] = {"min_value": declared.min, "max_value": declared.max}
    return number(**common, **bounds, widget=UnfoldAdminIntegerFieldWidget(attrs=hint))


def _anew(declared: ConfigField) -> str:
    return "If you change it, enter the secrets again." if declared.address else ""


def _range(declared: ConfigField) -> str:
    if declared.type not in ("integer", "number") or declared.min is declared.max is None:
        return ""
    if declared.max is None:
        return f"Min {declared.min}."
    if declared.min is None:
        return f"Max {declared.max}."
    return f"{declared.min} to {declared.max}."


def _secret_fields(key: str, declared: ConfigField, stored: Any) -> dict[str, forms.Field]:
    """A password input that is empty while untouched, and a way to remove what is stored."""
    shown = mask(str(stored)) if stored else ""
    help_text: str = escape(declared.description)
    if shown:
        help_text = f"{help_text} Stored: {escape(shown)}. Leave empty to keep it.".strip()
    fields: dict[str, forms.Field] = {
        key: forms.CharField(
            label=declared.label,
            help_text=help_text,
            required=declared.required and not shown,
            widget=UnfoldAdminPasswordWidget(
                attrs={
                    "autocomplete": "new-password",
                    "placeholder": shown or declared.placeholder,
                }
            ),
        )
    }
    if shown and not declared.required:
        fields[CLEAR + key] = forms.BooleanField(
            label=f"Remove the stored {declared.label}",
            required=False,
            widget=UnfoldBooleanSwitchWidget(),
        )
    return fields


def _whole(bound: int | float | None) -> int | None:
    return None if bound is None else int(bound)

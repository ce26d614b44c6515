"""The base of every section, and the error that every config raises."""

import os
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from megatron_blackmamba.settings.rules import Rule
from megatron_blackmamba.settings.values import listed, number


def _path(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"{text!r} contains a NUL, which no file's name can")
    return os.path.expanduser(text)


UserPath = Annotated[str, AfterValidator(_path)]
"""A path that may begin with ~. No shell expands the ~ in `folder=~/runs`."""


class ConfigError(ValueError):
    """A run that cannot be described; the message says where and what to do."""


class Section(BaseModel):
    """A section of a config: an unknown key is an error, numbers are finite, and values never change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        populate_by_name=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )
    rule: ClassVar[Rule | None] = None
    """The rule of the section's keys on resume, except those whose annotation names another."""

    @model_validator(mode="before")
    @classmethod
    def _as_people_write(cls, content: Any) -> Any:
        """Take 300B for a whole number, and one value for a list of one."""
        if not isinstance(content, dict):
            return content
        fields = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
        return {
            key: listed(number(value, fields[key]), fields[key]) if key in fields else value
            for key, value in content.items()
        }

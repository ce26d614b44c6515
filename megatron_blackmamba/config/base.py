"""The base of every section, and the error that every config raises."""

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path that may begin with ~. No shell expands the ~ in `folder=~/runs`."""


class ConfigError(ValueError):
    """A run that cannot be described; the message says where and what to do."""


class Section(BaseModel):
    """A section of a config: an unknown key is an error, and values never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True, protected_namespaces=()
    )

"""The base of every section: an unknown key is an error, and a config does not change once it is made."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True, protected_namespaces=()
    )

"""The JSON Schema of run files, by which editors complete and check them."""

from typing import Any

from megatron_blackmamba.settings import RunConfig
from megatron_blackmamba.settings.values import NUMBER

NAME = "run.schema.json"
"""The file that `blackmamba new` writes beside a run file."""
MODELINE = f"# yaml-language-server: $schema={NAME}\n"
"""The comment by which editors find the schema."""


def run_file_schema() -> dict[str, Any]:
    """Return the schema of a run file: RunConfig's, with all that a file may write otherwise.

    A file may leave out any key, since it can include another file that has it.
    """
    schema = RunConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)
        section["properties"] = {key: _as_written(field) for key, field in section.get("properties", {}).items()}
    texts = {"type": "array", "items": {"type": "string"}}
    schema["properties"] |= {
        "include": {
            "description": "Run files, or names of shipped runs, that come before this file.",
            "anyOf": [{"type": "string"}, texts],
        },
        "version": {"description": "Version of a config that a run has saved.", "type": "integer", "minimum": 1},
    }
    schema["$defs"]["TrainingConfig"]["properties"]["steps"] = {
        "description": "Steps of the whole run; sets `tokens`, with the batch and the sequence length.",
        **_as_written({"type": "integer", "exclusiveMinimum": 0}),
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "A run of blackmamba"}


def _as_written(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field that also takes 300B for a number, and one value for a list of one."""
    kinds = field.get("anyOf", [field])
    more: list[dict[str, Any]] = []
    if any(kind.get("type") in ("integer", "number") for kind in kinds):
        more.append({"type": "string", "pattern": f"^{NUMBER.pattern}$"})
    more += [kind["items"] for kind in kinds if kind.get("type") == "array" and "items" in kind]
    if not more:
        return field
    about: dict[str, Any] = {key: field[key] for key in ("description", "default", "title") if key in field}
    return {**about, "anyOf": [*({k: v for k, v in kind.items() if k not in about} for kind in kinds), *more]}

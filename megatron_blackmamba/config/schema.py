"""The JSON Schema of run files, for editors: what a file may hold, as people write it."""

from typing import Any

from megatron_blackmamba.config import migrations, spellings
from megatron_blackmamba.config.run import RunConfig

WHOLE_NUMBER = {"type": "string", "pattern": spellings.WHOLE_NUMBER}


def run_file_schema() -> dict[str, Any]:
    """Return the schema of one run file: no key is required, because included files and overrides give others.

    It accepts what `load` accepts, except for keys under the names of other projects: an editor should mark these.
    """
    schema = RunConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)
        section["properties"] = {name: _as_written(value) for name, value in section["properties"].items()}
    tokens = schema["$defs"]["TrainingConfig"]["properties"]["tokens"]
    steps = {**tokens, "title": "Steps", "description": "Steps of the whole run, in place of `tokens`."}
    schema["$defs"]["TrainingConfig"]["properties"]["steps"] = steps
    file = {"type": "string"}
    schema["properties"] |= {
        "include": {
            "anyOf": [file, {"type": "array", "items": file}],
            "description": "Files that this file changes: relative to it, or names of shipped runs.",
        },
        migrations.VERSION_KEY: {
            "type": "integer",
            "minimum": 1,
            "description": "Version of a saved config; leave it out of files written by hand.",
        },
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _as_written(value: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a key with the other spellings of its value: 300B, or one value for a list of one."""
    kinds = value.get("anyOf", [value])
    names = {kind.get("type") for kind in kinds}
    other = [WHOLE_NUMBER] if "integer" in names and "string" not in names else []
    other += [kind["items"] for kind in kinds if kind.get("type") == "array" and "items" in kind]
    if not other:
        return value
    about: dict[str, Any] = {name: value[name] for name in ("title", "description", "default") if name in value}
    plain = value.get("anyOf") or [{name: part for name, part in value.items() if name not in about}]
    return {**about, "anyOf": [*plain, *other]}

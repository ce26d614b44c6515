"""Files of a checkpoint that differ from those that were saved."""

import json
from pathlib import Path

from megatron_blackmamba.checkpoint import manifest


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Put another file into a checkpoint, its manifest saying that this is right."""
    (folder / name).write_bytes(content)
    path = folder / manifest.NAME
    declared = json.loads(path.read_bytes())
    declared["files"][name] = manifest.describe(folder / name)
    path.write_text(json.dumps(declared))

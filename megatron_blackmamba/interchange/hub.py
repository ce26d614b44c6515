"""Names on the Hugging Face hub: looked up among what was downloaded before; nothing is downloaded here."""

import re
from pathlib import Path

from megatron_blackmamba.interchange.canonical import InterchangeError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LOCAL = {"runs", "exports", "studies"}


def local_folder(path: Path) -> Path:
    """Return the folder, or the newest downloaded snapshot where `path` is a name such as `Zyphra/BlackMamba-2.8B`."""
    name = str(path)
    if path.exists() or not _NAME.fullmatch(name) or path.parent.name in _LOCAL or path.parent.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        raise InterchangeError(
            f"{name}: no such folder in {Path.cwd()}, and no download of that name. To get a model from the hub, run "
            f"`hf download {name}` first, then repeat this command"
        ) from None

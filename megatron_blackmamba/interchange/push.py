"""An export uploaded to the Hugging Face hub."""

from dataclasses import dataclass
from pathlib import Path

from megatron_blackmamba.interchange.canonical import InterchangeError


@dataclass(frozen=True)
class Upload:
    """A file and its place on the hub."""

    file: str
    bytes: int
    to: str


def check_name(repository: str) -> None:
    """Refuse a name that the hub does not allow."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise InterchangeError(f"--push-to {repository}: {str(error).splitlines()[0]}") from None
    if "/" not in repository:
        raise InterchangeError(f"--push-to {repository}: no owner. Give OWNER/NAME")


def uploads(folder: Path, repository: str) -> list[Upload]:
    """Return the files of an export and where each goes."""
    from huggingface_hub import constants

    at = f"{constants.ENDPOINT}/{repository}/blob/main"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files]
    return [Upload(name, size, f"{at}/{name}") for name, size in names]


def push(folder: Path, repository: str, private: bool) -> str:
    """Create the repository if it does not exist, upload the folder, and return its address."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository, commit_message="Upload a BlackMamba export")
    except Exception as error:  # offline, no token, no right, no room: many types, one advice
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InterchangeError(
            f"{repository}: not uploaded ({type(error).__name__}: {told}). The export is complete; log in with "
            f"`hf auth login`, then `hf upload {repository} {folder}`"
        ) from None
    return f"{api.endpoint}/{repository}"

"""A copy of the code as it is now: a job that waits in the queue for days runs what was launched, nothing later."""

import os
import shutil
import subprocess
from pathlib import Path

from megatron_blackmamba.console import interrupts
from megatron_blackmamba.formats.atomic import sync_folder

PACKAGE = Path(__file__).resolve().parents[1]
UNWANTED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*")


def take_snapshot(folder: Path) -> None:
    """Copy package, configs and scripts into `folder`, which appears whole or not at all."""
    temporary = folder.with_name(f".{folder.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with interrupts.unfinished(temporary):
            for name in ("megatron_blackmamba", "configs", "scripts"):
                shutil.copytree(home(name), temporary / name, ignore=UNWANTED)
            (temporary / "version.txt").write_text(_version(), encoding="utf-8")
            os.replace(temporary, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def home(name: str) -> Path:
    """Return a folder of the repository; if installed, configs and scripts are inside the package."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def _version() -> str:
    """Return the commit and the uncommitted changes, as far as git knows."""
    from megatron_blackmamba.version import __version__

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(PACKAGE.parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, timeout=30)
            return done.stdout.decode(errors="replace")  # a file that was changed may be in any encoding
        except (OSError, subprocess.TimeoutExpired):
            return ""

    if not git("ls-files", str(PACKAGE / "__init__.py")):  # installed; the commit of whatever lies around is not ours
        return f"version {__version__}\n"
    return f"version {__version__}\ncommit {git('rev-parse', 'HEAD')}\n{git('diff', 'HEAD')}"

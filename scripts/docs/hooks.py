"""Hooks of MkDocs: add the generated pages, resolve links to files outside docs/, and adapt pictures to the theme."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # MkDocs loads this file alone, by its path

from scripts.docs import picture, reference  # noqa: E402

_PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]*)" src="([^"]+)">\s*</picture>')
_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are generated, and the pictures."""
    pages = {"reference/commands.md": reference.commands_page(), "reference/config.md": reference.config_page()}
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    stale = [path for path, content in picture.pictures().items() if path.read_text() != content]
    if stale:
        raise SystemExit(f"{stale[0]} is out of date: python -m scripts.docs.picture")
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to the repository's files into plain names, which readers of a checkout find; refuse dead ones.

    A picture follows the colours of the page, even if the system has others.
    """
    markdown = _PICTURE.sub(r"![\2](\3#only-light)![\2](\1#only-dark)", markdown)
    if "<picture" in markdown:
        raise SystemExit(f"{page.file.src_uri}: write <picture> as in docs/index.md")
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def name(found: re.Match) -> str:
        text, target = found[1], (folder / ".." / found[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        path = target.relative_to(ROOT)
        if not target.exists():
            raise SystemExit(f"{page.file.src_uri}: link to {path}: no such file")
        return f"`{path}`" if text.strip("`") in str(path) else f"{text} (`{path}`)"

    return _OUTSIDE.sub(name, markdown)

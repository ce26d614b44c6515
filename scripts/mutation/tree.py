"""A private copy of the repository and a Python that imports it, so that nobody's files are ever changed."""

import compileall
import fcntl
import shutil
import subprocess
import sys
import sysconfig
import venv
from contextlib import contextmanager
from pathlib import Path
from py_compile import PycInvalidationMode

HERE = Path(__file__).parent
IGNORED = {".git", ".venv", "build", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


class Tree:
    """The copy: `root` holds the files, `python` runs them, `measurements` is what coverage wrote."""

    def __init__(self, source: Path, work: Path):
        self.source, self.work = source.resolve(), work.resolve()
        self.root = self.work / "tree"
        self.environment = self.work / "python"
        self.python = self.environment / "bin" / "python"
        self.measurements = self.work / "measurements"
        self.context = self.work / "context"  # names the running test for the processes that it starts

    @contextmanager
    def locked(self):
        self.work.mkdir(parents=True, exist_ok=True)
        with open(self.work / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                sys.exit(f"another run uses this copy: {self.work}. Wait for it, or give --work another folder.")
            yield

    def refresh(self) -> None:
        """Make the copy equal to the source, whatever an interrupted run left in it."""
        shutil.rmtree(self.root, ignore_errors=True)
        for name in self._files():
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.source / name, target, follow_symlinks=False)
        # By hash: a mutant may have the size and the second of the original.
        compileall.compile_dir(self.root, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        self._make_python()

    def _files(self) -> list[str]:
        """Return what git knows or would add, and compiled libraries; all files where git knows nothing."""
        command = ["git", "-C", str(self.source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, text=True)
        names = [name for name in listed.stdout.split("\0") if name and is_file_or_link(self.source / name)]
        found = [p for p in self.source.rglob("*") if is_file_or_link(p) and not p.is_relative_to(self.work)]
        inside = {str(p.relative_to(self.source)): p for p in found}
        kept = {name for name, path in inside.items() if not IGNORED & set(path.relative_to(self.source).parts)}
        return sorted({*names, *(name for name in kept if name.endswith(".so"))} if names else kept)

    def _make_python(self) -> None:
        """Make a virtual environment that finds the copy first, then the packages of this interpreter."""
        if not self.python.exists():
            venv.create(self.environment, symlinks=True)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(self.environment)}))
        packages = [path for path in sys.path if path.endswith("-packages")]
        for helper in ("measure.py", "plugin.py", "forkserver.py"):
            shutil.copy(HERE / helper, own / f"mutation_{helper}")
        (own / "mutation.pth").write_text("\n".join([str(self.root), *packages, "import mutation_measure", ""]))
        for program in (path for path in Path(sys.executable).parent.iterdir() if path.is_file()):
            first = program.read_bytes()[:200].split(b"\n")[0]
            if first.startswith(b"#!") and b"python" in first and not program.is_symlink():
                text = program.read_text().split("\n", 1)[1]
                target = self.environment / "bin" / program.name
                target.write_text(f"#!{self.python}\n{text}")
                target.chmod(0o755)


def is_file_or_link(path: Path) -> bool:
    return path.is_file() or path.is_symlink()

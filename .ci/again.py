"""Rerun the failed tests of a pytest run, one at a time, to separate flaky tests from broken ones.

`python .ci/again.py REPORT.xml` reads a `--junitxml` report. It succeeds if at most `MOST` tests failed and all of them
pass now. It lists those as unsteady: they depend on load or chance, and still need a fix.
"""

import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

MOST = 3


def failed(report: Path, root: Path) -> list[str]:
    """Return the identifiers of the tests that failed or raised an error, as pytest takes them."""
    found = []
    for case in xml.parse(report).iter("testcase"):
        if case.find("failure") is None and case.find("error") is None:
            continue
        parts, name = case.get("classname", "").split("."), re.sub(r"@\w+$", "", case.get("name", ""))
        length = next(
            (n for n in range(len(parts), 0, -1) if root.joinpath(*parts[:n]).with_suffix(".py").is_file()), 0
        )
        if not length:  # a module that could not be collected: its name is the path with dots
            return []
        found.append("::".join([str(Path(*parts[:length]).with_suffix(".py")), *parts[length:], name]))
    return list(dict.fromkeys(found))


def main(report: Path, root: Path) -> int:
    """Rerun the failed tests; return 0 if there are at most `MOST` and all pass."""
    tests = failed(report, root) if report.is_file() else []
    if not 0 < len(tests) <= MOST:
        print(f"{len(tests)} failed tests to run again; only 1 to {MOST} may be unsteady.", file=sys.stderr)
        return 1
    code = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", *tests], cwd=root).returncode
    for test in tests:
        print(f"{'unsteady' if code == 0 else 'failed twice, or failed beside one that did'}: {test}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), Path(__file__).resolve().parent.parent))

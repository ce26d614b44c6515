"""`make pythons` runs `make test` as a user's shell would."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MAKEFILE = """
pythons:
\t@{python} -c "from pathlib import Path; from scripts import pythons; pythons.ROOT = Path(); \
\t  pythons.git = lambda *words: 'a commit'; pythons.borders.versions_in = lambda *words: {{}}; \
\t  print(pythons.run('{python}').said)"
test:
\t@echo "given [$(ARGS)], 1 passed"
"""


def test_arguments_of_pythons_do_not_reach_pytest(tmp_path):
    (tmp_path / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
    words = ["make", "--no-print-directory", "pythons", "ARGS=python3.12", f"PYTHONPATH={ROOT}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "given [], 1 passed", done.stderr

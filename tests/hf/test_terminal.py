"""The model card's example, run on a terminal, where transformers may ask questions that pytest never sees."""

import os
import pty
import re
import sys


def test_card_example_asks_nothing(export, silu):
    folder = export(silu)
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execv(sys.executable, [sys.executable, "-c", code.replace("The state of a recurrent model", "a state")])
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        shown += piece
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, shown.decode()
    assert "custom code" not in shown.decode() and "a state" in shown.decode()

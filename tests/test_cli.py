"""The messages of the command line outside its commands."""

import pytest

from megatron_blackmamba import cli


@pytest.mark.parametrize(("quiet", "said"), [(False, "blackmamba: an old name\n"), (True, "")])
def test_notes_are_silenced_by_quiet(quiet, said, capsys):
    cli._note("an old name", quiet)
    assert capsys.readouterr().err == said

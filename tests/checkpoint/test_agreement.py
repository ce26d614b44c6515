"""A rank counts as alive while it waits for others whose work moves."""

from megatron_blackmamba.checkpoint.agreement import while_any_moves

WHAT = "verifying step 3"


class Other:
    """A world with another rank, which says in turn whether it still works, and whether that has moved."""

    def __init__(self, *answers):
        self.answers = iter(answers)

    def any_rank(self, said):
        return next(self.answers) or said


def test_waiting_rank_lives_while_another_moves():
    heard, other = [], Other(True, False, True, True, True, True, False)
    assert while_any_moves(other, heard.append, WHAT, lambda moved: "done") == "done"
    assert heard == [WHAT, *[f"waiting for another rank: {WHAT}"] * 2]


def test_work_that_never_moves_shows_no_life():
    heard = []
    while_any_moves(Other(*[True, False] * 50, False), heard.append, WHAT, lambda moved: None)
    assert heard == [WHAT]


def test_own_moves_are_signs_of_life():
    heard = []
    while_any_moves(Other(True, False, False), heard.append, WHAT, lambda moved: moved())
    assert len(heard) == 2

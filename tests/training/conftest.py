import pytest

from megatron_blackmamba.formats.run_folder import RunFolder
from tests.training.forks import Forks
from tests.training.runs import ON_TWO, losses


@pytest.fixture(scope="session")
def forks():
    """Ranks that start at once; everything that uses them runs in one test process (`make test` has several)."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def undisturbed(forks, tmp_path_factory):
    """The losses of the 30 steps of ON_TWO when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = forks.run(folder, ON_TWO)
    assert job.wait() == [0, 0], job.output()
    assert RunFolder(folder / "run").done.exists()
    return losses(folder)

import pytest

from tests.training.forks import Forks


@pytest.fixture(scope="session")
def forks():
    """Ranks that start at once; everything that uses them runs in one test process (`make test` has several)."""
    forks = Forks()
    yield forks
    forks.close()

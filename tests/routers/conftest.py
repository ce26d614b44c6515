from tests.model.conftest import build, place

__all__ = ["build", "place"]

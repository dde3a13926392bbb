"""Fixtures of the tests of data modules."""

import pytest


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed of the run is the default, whatever an earlier test has set."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)

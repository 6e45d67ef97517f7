"""The same kind of server as the end-to-end tests."""

from tests.e2e.conftest import server, stocked

__all__ = ["server", "stocked"]

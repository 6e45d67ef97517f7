"""For all tests: kernel tests run as root, and leave the host as they found it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from tests import leaks

# libuv opens one pair of descriptors for the life of the process, with its first loop: not a test's leak.
uvloop.new_event_loop().close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("kernel"):
            item.add_marker(pytest.mark.skip(reason="kernel tests need root"))


def _check(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    below = Path(tmp_path_factory.getbasetemp())
    leaks.become_subreaper()
    gc.collect()
    before = leaks.snapshot(below)
    yield
    gc.collect()
    if left := leaks.left_behind(before, below):
        pytest.fail(f"{request.node.name} left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def leak_check_of_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Around a module with kernel tests, so that what its own fixtures share is seen as well."""
    if any(item.get_closest_marker("kernel") for item in request.session.items if item.path == request.path):
        yield from _check(request, tmp_path_factory)
    else:
        yield


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Around each kernel test: mounts, groups, namespaces, devices, interfaces, descriptors, processes."""
    if request.node.get_closest_marker("kernel"):
        yield from _check(request, tmp_path_factory)
    else:
        yield

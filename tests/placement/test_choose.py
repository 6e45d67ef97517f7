from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from dsec.core.errors import AdmissionRefused, Unavailable
from dsec.core.specs import SandboxSpec
from dsec.placement.choose import choose
from dsec.placement.service import Placement
from dsec.wire.edge import BackendInfo, NodeInfo
from dsec.wire.local import LocalBus

SPEC = SandboxSpec(image="base", backend="fake")


def node(edge: str, **fields: Any) -> NodeInfo:
    return NodeInfo(
        **{
            "edge": edge,
            "version": "0",
            "backends": [BackendInfo(name="fake", available=True)],
            "counts": {},
            "max_sandboxes": 100,
            "memory_total_mb": 1000,
            "memory_available_mb": 900,
            "load": 0.0,
            "cpus": 2,
            **fields,
        }
    )


def test_filters() -> None:
    nodes = [
        node("draining", draining=True),
        node("full", counts={"running": 60, "creating": 40}),
        node("none", backends=[BackendInfo(name="fake", available=False)]),
        node("other", backends=[BackendInfo(name="container", available=True)]),
    ]
    rng = random.Random(1)
    assert choose(nodes, SPEC, {}, rng) is None
    assert choose([*nodes, node("good")], SPEC, {}, rng) == "good"
    assert choose([*nodes, node("good")], SPEC, {"good": 100}, rng) is None
    assert choose([*nodes, node("good")], SPEC, {}, rng, without=frozenset({"good"})) is None
    assert choose([node("e", counts={"stopped": 1000})], SPEC, {}, rng) == "e"


def test_least_loaded_of_a_sample() -> None:
    rng = random.Random(1)
    nodes = [node("busy", counts={"running": 90}), node("free"), node("some", counts={"running": 50})]
    assert {choose(nodes, SPEC, {}, rng) for _ in range(50)} == {"free"}


def test_no_herd() -> None:
    """Own placements count at once, though the report is old."""
    rng, recent = random.Random(1), Counter[str]()
    nodes = [node(f"e{i}") for i in range(10)]
    for _ in range(500):
        edge = choose(nodes, SPEC, recent, rng)
        assert edge is not None
        recent[edge] += 1
    assert max(recent.values()) - min(recent.values()) < 20


async def test_service() -> None:
    bus = LocalBus()
    reports = {"a": node("a", counts={"running": 100}), "b": node("b")}

    async def silent(_: object) -> NodeInfo:
        raise Unavailable("no")

    async def a(_: object) -> NodeInfo:
        return reports["a"]

    async def b(_: object) -> NodeInfo:
        return reports["b"]

    bus.serve("edge.a.node", a)
    bus.serve("edge.b.node", b)
    bus.serve("edge.c.node", silent)
    placement = Placement(bus, ["a", "b", "c"])
    await placement.start()
    assert placement.place(SPEC) == "b"
    with pytest.raises(AdmissionRefused):
        placement.place(SPEC, frozenset({"b"}))
    assert placement.place_by_key("k") == Placement(bus, ["c", "b", "a"]).place_by_key("k")
    await placement.stop()


def test_one_edge_is_not_asked() -> None:
    placement = Placement(LocalBus(), ["only"])
    assert placement.place(SPEC) == placement.place_by_key("x") == "only"

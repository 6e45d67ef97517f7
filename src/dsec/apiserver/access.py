"""What all handlers share: the Bus, who may touch what, and which edge holds it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from dsec.apiserver.http import Request
from dsec.core.errors import WrongEdge
from dsec.core.ids import edge_of
from dsec.iam.tokens import Principal
from dsec.placement.service import Placement
from dsec.wire import edge as m
from dsec.wire.bus import Bus, Stream

PROJECTS_KNOWN: Final = 65_536


class Access:
    def __init__(self, bus: Bus, placement: Placement) -> None:
        self.bus = bus
        self.placement = placement
        self._edges = frozenset(placement.edges)
        self._projects: OrderedDict[str, str] = OrderedDict()
        """Of sandboxes that a principal with a scope has asked for; a sandbox never changes its project."""

    def edge(self, sandbox_id: str) -> str:
        """Raises InvalidArgument for what is no id, WrongEdge for an edge that is not known here."""
        edge = edge_of(sandbox_id)
        if edge not in self._edges:
            raise WrongEdge(f"{sandbox_id} is of edge {edge!r}, which this server does not know")
        return edge

    async def ask(self, sandbox_id: str, verb: str, message: Any) -> Any:
        """A request to the edge that the id names."""
        return await self.bus.request(f"edge.{self.edge(sandbox_id)}.{verb}", message)

    async def sandbox(self, r: Request) -> str:
        """The sandbox that the path names, if the caller may touch it."""
        sandbox_id = r.params[0]
        if r.principal.project is not None:
            r.principal.check(await self._project(sandbox_id))
        else:
            self.edge(sandbox_id)
        return sandbox_id

    async def _project(self, sandbox_id: str) -> str:
        project = self._projects.get(sandbox_id)
        if project is None:
            info: m.SandboxInfo = await self.ask(sandbox_id, "get", m.SandboxId(sandbox_id=sandbox_id))
            project = self._projects[sandbox_id] = info.project
            if len(self._projects) > PROJECTS_KNOWN:
                self._projects.popitem(last=False)
        return project

    def known_project(self, sandbox_id: str) -> str:
        """Its project, where it was asked for before."""
        return self._projects.get(sandbox_id, "")

    async def attach(self, message: m.AttachOperation) -> Stream:
        return await self.bus.stream(f"edge.{self.edge(message.sandbox_id)}.attach", message)


def scoped(principal: Principal, project: str | None) -> str | None:
    """The project to list: a principal with a scope sees no other."""
    if principal.project is None:
        return project
    if project is not None:
        principal.check(project)
    return principal.project

"""The OpenAPI 3.1 document, made of the route table and the structs themselves."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

import dsec
from dsec.apiserver.router import Query, Route
from dsec.core.errors import BY_CODE
from dsec.wire import api

REF: Final = "#/components/schemas/{name}"
ALWAYS: Final = (api.ErrorAnswer, api.ExecRequest, api.ShellRequest, api.WatchEvent, api.AttachEnd)
SCHEMA: Final[dict[str, dict[str, Any]]] = {
    "string": {"type": "string"},
    "path": {"type": "string", "maxLength": 4095},
    "integer": {"type": "integer", "minimum": 0},
    "number": {"type": "number", "minimum": 0},
    "boolean": {"type": "boolean"},
}


def document(routes: list[Route]) -> bytes:
    """As JSON."""
    types = _types(routes)
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    known = dict(zip(map(str, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        method = "get" if route.method == "WS" else route.method.lower()
        paths.setdefault(route.path, {})[method] = _operation(route, known)
    whole = {
        "openapi": "3.1.0",
        "info": {
            "title": "DSec",
            "version": dsec.__version__,
            "description": "Sandboxes for training and evaluating agents.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "responses": {"Error": _error(known)},
        },
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=1)


def _types(routes: list[Route]) -> list[Any]:
    types: list[Any] = list(ALWAYS)
    for route in routes:
        for t in (route.answers, route.body):
            t = t[1] if isinstance(t, tuple) else t
            if t is not None and not isinstance(t, str) and t not in types:
                types.append(t)
    return types


def _error(known: dict[str, Any]) -> dict[str, Any]:
    codes = ", ".join(sorted(BY_CODE))
    return {"description": f"Codes: {codes}.", "content": _content(api.ErrorAnswer, known)}


def _operation(route: Route, known: dict[str, Any]) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", route.path)
    parameters = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    parameters += [_parameter(q, "query") for q in route.query]
    parameters += [_parameter(q, "header") for q in route.headers]
    out: dict[str, Any] = {
        "operationId": _name(route),
        "summary": route.summary,
        "responses": _responses(route, known),
    }
    if parameters:
        out["parameters"] = parameters
    if route.body is not None:
        out["requestBody"] = {"required": True, "content": _content(route.body, known)}
    if route.public:
        out["security"] = []
    if route.method == "WS":
        out["description"] = "A WebSocket: this request is its upgrade."
    return out


def _name(route: Route) -> str:
    path = re.sub(r"[^A-Za-z0-9]+", "_", route.path.removeprefix("/v1/")).strip("_")
    return f"{route.method.lower()}_{path}"


def _parameter(q: Query, where: str) -> dict[str, Any]:
    schema = SCHEMA[q.kind]
    out: dict[str, Any] = {"name": q.name, "in": where, "required": q.required}
    out["schema"] = {"type": "array", "items": schema} if q.repeated else schema
    if q.about:
        out["description"] = q.about
    return out


def _responses(route: Route, known: dict[str, Any]) -> dict[str, Any]:
    error = {"$ref": "#/components/responses/Error"}
    if route.method == "WS":
        return {"101": {"description": "The socket is open."}, "default": error}
    about = {200: "Done.", 201: "Made.", 202: "It goes on."}
    out: dict[str, Any] = {
        str(status): {"description": about[status], "content": _content(route.answers, known)}
        for status in route.status
    }
    return {**out, "default": error}


def _content(kind: Any, known: dict[str, Any]) -> dict[str, Any]:
    if isinstance(kind, tuple):
        return {kind[0]: {"schema": known[str(kind[1])]}}
    if isinstance(kind, str):
        schema: dict[str, Any] = {} if kind == "application/json" else {"type": "string", "format": "binary"}
        return {kind: {"schema": schema}}
    return {"application/json": {"schema": known[str(kind)]}}

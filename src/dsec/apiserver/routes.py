"""All routes of `/v1`, in one table."""

from __future__ import annotations

from typing import Final

from dsec.apiserver.audit import Audit
from dsec.apiserver.files import Files
from dsec.apiserver.layers import Layers
from dsec.apiserver.network import Network
from dsec.apiserver.node import NodeApi
from dsec.apiserver.operations import Operations
from dsec.apiserver.router import Query, Route
from dsec.apiserver.sandboxes import Sandboxes
from dsec.apiserver.sockets import Sockets
from dsec.wire import api
from dsec.wire import edge as m
from dsec.wire import layers as lm
from dsec.wire.audit import AuditPage

BOX: Final = "/v1/sandboxes/{id}"
OP: Final = BOX + "/operations/{op_id}"
BYTES: Final = "application/octet-stream"
TAR: Final = "application/x-tar"

PATH = Query("path", "path", "Absolute, percent-encoded; resolved inside the sandbox.", required=True)
USER = Query("user", about="Acting user: name, uid, name:group, uid:gid.")
OP_ID = Query("op_id", about="Made by the client; a repeat with the same id joins the first.")
OWNER = Query("owner", about="user, user:group or uid:gid; absent: the acting user.")
FROM = (
    Query("stdout_from", "integer", "Offset from which stdout is wanted."),
    Query("stderr_from", "integer", "Offset from which stderr is wanted."),
)
KEY = Query("Idempotency-Key", about="A repeat with the same key answers with the first one's sandbox.")


def routes(
    sandboxes: Sandboxes,
    operations: Operations,
    files: Files,
    sockets: Sockets,
    layers: Layers,
    node: NodeApi,
    audit: Audit,
    network: Network,
) -> list[Route]:
    return [
        *_sandboxes(sandboxes),
        *_operations(operations, sockets),
        *_files(files, sockets),
        Route("GET", "/v1/node", node.node, "The node: backends, counts, memory, load.", m.NodeInfo),
        *_layers(layers),
        *_network(network),
        _audit(audit),
        Route("GET", "/openapi.json", node.openapi, "This document.", "application/json", public=True),
        Route("GET", "/healthz", node.health, "Is the server up?", api.Health, public=True),
    ]


def _network(n: Network) -> list[Route]:
    return [
        Route("GET", BOX + "/network_rules", n.get, "What the sandbox may reach.", m.NetworkInfo),
        Route(
            "PUT",
            BOX + "/network_rules",
            n.set_rules,
            "Change what the sandbox may reach; answers when it is in force.",
            m.NetworkInfo,
            api.NetworkRulesRequest,
        ),
        Route(
            "GET",
            BOX + "/events",
            n.events,
            "What was seen of the sandbox from outside, such as flows that its rules refused.",
            m.EventPage,
            query=(
                Query("after", "integer", "Events behind this position."),
                Query("limit", "integer"),
                Query("wait", "number", "Seconds to wait for the first one."),
            ),
        ),
    ]


def _audit(a: Audit) -> Route:
    return Route(
        "GET",
        "/v1/audit",
        a.query,
        "The audit record: who did what to which sandbox, and what misbehaved inside.",
        AuditPage,
        query=(
            Query("after", "integer", "Entries behind this position."),
            Query("sandbox"),
            Query("project"),
            Query("who", about="A token's id or name."),
            Query("kind", about="action, misbehaviour or record."),
            Query("what", about="Such as operations.exec; with `.` or `*` at its end the beginning of one."),
            Query("since", "number", "Unix seconds."),
            Query("limit", "integer"),
            Query("format", about="json, or ndjson: one entry a line, and the next position in X-Next."),
        ),
    )


def _layers(s: Layers) -> list[Route]:
    reference = Query(
        "ref", "string", "Name, digest, or the first 12 and more figures of one.", required=True
    )
    return [
        Route(
            "GET",
            "/v1/layers",
            s.list,
            "Layers that sandboxes can stand on, in the order of their names, in pages.",
            lm.LayerPage,
            query=(
                Query("prefix"),
                Query("kind"),
                Query("after", about="`next` of the page before."),
                Query("limit", "integer"),
            ),
        ),
        Route("GET", "/v1/layer", s.get, "All that is known of a layer.", lm.LayerInfo, query=(reference,)),
        Route(
            "DELETE",
            "/v1/layer",
            s.remove,
            "Take a name away, and with the last name its layer.",
            lm.Removed,
            query=(reference,),
        ),
        Route(
            "POST",
            "/v1/layers:import",
            s.import_image,
            "Import an image of a registry; answers when it can be used.",
            lm.LayerInfo,
            api.ImportRequest,
        ),
    ]


def _sandboxes(s: Sandboxes) -> list[Route]:
    filters = (
        Query("project"),
        Query("task"),
        Query("label", about="KEY=VALUE; all must match.", repeated=True),
        Query("state", repeated=True),
        Query("after", about="The last id of the page before."),
        Query("limit", "integer"),
    )
    return [
        Route(
            "POST",
            "/v1/sandboxes",
            s.create,
            "Create a sandbox; answers when it runs.",
            m.SandboxInfo,
            api.CreateRequest,
            headers=(KEY,),
            status=(201,),
        ),
        Route(
            "POST",
            BOX + "/pack_diff",
            s.pack,
            "Take what the sandbox has changed as a layer; it goes on.",
            lm.Packed,
            api.PackRequest,
        ),
        Route(
            "POST",
            "/v1/sandboxes:batch",
            s.create_batch,
            "Create many: one JSON line for each, as it becomes ready or fails.",
            ("application/x-ndjson", api.BatchLine),
            api.BatchRequest,
        ),
        Route(
            "POST",
            "/v1/sandboxes:cancel",
            s.cancel,
            "Undo a creation or a batch by its key or name.",
            api.Cancelled,
            api.CancelRequest,
        ),
        Route(
            "GET",
            "/v1/sandboxes",
            s.list,
            "Sandboxes, in the order of their ids.",
            m.SandboxPage,
            query=filters,
        ),
        Route("GET", BOX, s.get, "One sandbox.", m.SandboxInfo),
        Route(
            "DELETE",
            BOX,
            s.delete,
            "Stop a sandbox; answers when nothing of it is left. A repeat is no error.",
            m.SandboxInfo,
            query=(Query("reason"),),
        ),
        Route("GET", BOX + "/stats", s.stats, "What it uses.", m.SandboxStats),
    ]


def _operations(o: Operations, sockets: Sockets) -> list[Route]:
    started = (200, 202)
    attach = (
        *FROM,
        Query("stdin_from", "integer", "This stream also sends input, from this offset on."),
        Query("start", "boolean", "The first message is an ExecRequest or a ShellRequest, which begins it."),
    )
    return [
        Route(
            "POST",
            BOX + "/exec",
            o.exec,
            "Run one program, with no shell.",
            api.Operation,
            api.ExecRequest,
            status=started,
        ),
        Route(
            "POST",
            BOX + "/shell",
            o.shell,
            "Run a command in a shell session.",
            api.Operation,
            api.ShellRequest,
            status=started,
        ),
        Route(
            "DELETE",
            BOX + "/sessions/{session}",
            o.close_session,
            "End a shell session and what runs in it.",
            api.Done,
            query=(OP_ID,),
        ),
        Route("GET", BOX + "/operations", o.list, "The newest 1000, oldest first.", api.OperationList),
        Route(
            "GET",
            OP,
            o.get,
            "One operation with its output; waits for its end up to `wait` seconds.",
            api.Operation,
            query=(Query("wait", "number"), *FROM),
            status=started,
        ),
        Route("POST", OP + "/signal", o.signal, "Send a signal.", api.Operation, api.SignalRequest),
        Route(
            "POST",
            OP + "/input",
            o.input,
            "Bytes for its stdin.",
            api.Operation,
            BYTES,
            query=(
                Query("eof", "boolean", "Its stdin ends after this."),
                Query("offset", "integer", "Where these bytes belong, so that a repeat is safe."),
            ),
        ),
        Route("POST", OP + "/resize", o.resize, "Size of its terminal.", api.Operation, api.ResizeRequest),
        Route("WS", OP + "/attach", sockets.attach, "Its streams, both ways.", query=attach),
    ]


def _files(f: Files, sockets: Sockets) -> list[Route]:
    files = BOX + "/files"
    common = (PATH, USER, OP_ID)
    write = (
        *common,
        Query("mode", about="Octal."),
        OWNER,
        Query("mtime_ns", "integer"),
        Query("parents", "boolean", "Make missing parents."),
        Query("append", "boolean"),
    )
    span = (Query("offset", "integer"), Query("length", "integer"))
    remove = (Query("recursive", "boolean"), Query("missing_ok", "boolean"))
    return [
        Route(
            "GET",
            files,
            f.list,
            "Entries of a directory.",
            api.FileList,
            query=(*common, Query("depth", "integer"), Query("limit", "integer")),
        ),
        Route("DELETE", files, f.remove, "Remove a file or directory.", api.Done, query=(*common, *remove)),
        Route(
            "GET",
            files + "/stat",
            f.stat,
            "What is there.",
            api.FileInfo,
            query=(*common, Query("follow", "boolean", "Symlinks; default true.")),
        ),
        Route(
            "POST",
            files + "/mkdir",
            f.mkdir,
            "Make a directory.",
            api.FileInfo,
            query=(*common, Query("mode", about="Octal."), Query("parents", "boolean")),
        ),
        Route(
            "POST",
            files + "/move",
            f.move,
            "Move or rename.",
            api.FileInfo,
            query=(*common, Query("target", "path", required=True), Query("overwrite", "boolean")),
        ),
        Route(
            "GET",
            files + "/content",
            f.read,
            "A file's bytes.",
            BYTES,
            query=(*common, *span),
            quiet=False,
        ),
        Route(
            "PUT",
            files + "/content",
            f.write,
            "Write a file: whole, or not at all.",
            api.FileInfo,
            BYTES,
            query=write,
            status=(201,),
        ),
        Route(
            "GET",
            files + "/tree",
            f.read_tree,
            "A directory as a tar archive.",
            TAR,
            query=common,
            quiet=False,
        ),
        Route(
            "PUT",
            files + "/tree",
            f.write_tree,
            "Unpack a tar archive below `path`.",
            api.TreeResult,
            TAR,
            query=(*common, OWNER),
            status=(201,),
        ),
        Route(
            "WS",
            files + "/watch",
            sockets.watch,
            "Changes below a directory: one WatchEvent per text frame.",
            query=(*common, Query("recursive", "boolean")),
        ),
    ]

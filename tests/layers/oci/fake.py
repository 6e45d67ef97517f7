"""A registry of the tests' own, that serves a layout and can be told to misbehave."""

from __future__ import annotations

import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.layers.oci.conftest import answer

from dsec.layers.oci import NewImage, write_layout
from dsec.layers.oci.export import Written
from dsec.layers.oci.model import OCI_MANIFEST

Hook = Callable[[BaseHTTPRequestHandler], bool]
"""True when it has answered."""


class Fake:
    """Answers for one image, at `a/b:1`, unless the hook has."""

    def __init__(self, image: NewImage, root: Path) -> None:
        self.written: Written = write_layout(root, image)
        self._root = root
        self.hook: Hook = lambda request: False

    def data(self, digest: str) -> bytes:
        return (self._root / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()

    @property
    def layer(self) -> str:
        """The digest of the first layer."""
        return self.written.layers[0].digest

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        if self.hook(request):
            return
        found = re.fullmatch(r"/v2/a/b/(manifests|blobs)/(.*)", request.path)
        if request.path == "/v2/":
            answer(request, 200)
        elif not found:
            answer(request, 404)
        elif found[1] == "manifests":
            answer(request, 200, self.data(self.written.manifest.digest), Content_Type=OCI_MANIFEST)
        else:
            self.blob(request, found[2])

    def blob(self, request: BaseHTTPRequestHandler, digest: str) -> None:
        data = self.data(digest)
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        if asked:
            start = int(asked[1])
            span = f"bytes {start}-{len(data) - 1}/{len(data)}"
            answer(request, 206, data[start:], Content_Range=span)
        else:
            answer(request, 200, data)

"""dsec layer build -f: a Dockerfile's steps, run in sandboxes of a server that has the same store."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dsec.cli.layer_copy import LastView, Placer, survey
from dsec.cli.output import errors
from dsec.client import DSecClient, DSecContainerRunArgs, Sandbox
from dsec.core.errors import InvalidArgument, LayerCorrupt, UnknownLayer
from dsec.core.images import ImageConfig
from dsec.layers.build import Builder, Wanted
from dsec.layers.build import check as check_wanted
from dsec.layers.dockerfile import lines
from dsec.layers.dockerfile.build import Base, Built, Output, Progress, StepFailed, build
from dsec.layers.dockerfile.copying import Copy
from dsec.layers.dockerfile.parser import parse
from dsec.layers.dockerfile.plan import plan
from dsec.layers.importer import Importer
from dsec.layers.model import Layer
from dsec.layers.resolver import registry_reference
from dsec.layers.store import LayerStore

KEY: Final = "step:"
TAIL: Final = 2000
"""Bytes of a failed command's output in the error."""
MEMORY_MB: Final = 4096
DISK_MB: Final = 65536


class SandboxRunner:
    """RUN in a sandbox each, COPY into a layer directly. The client's server must have `builder`'s store.

    To be closed.
    """

    def __init__(self, builder: Builder, client: DSecClient) -> None:
        self._builder = builder
        self._store = builder.store
        self._client = client
        self._views = LastView(self._store)

    def close(self) -> None:
        self._views.close()

    async def resolve(self, reference: str, platform: str) -> Base:
        """A layer of the store, or an image of a registry, imported; a bare name is no image."""
        layer = await asyncio.to_thread(self._resolve, reference, platform)
        layers = [one.digest for one in self._store.expand([layer])]
        config = self._store.resolve(layer.name or layer.digest, []).config
        return Base(hashlib.sha256("".join(layers).encode()).hexdigest(), layers, config)

    def _resolve(self, reference: str, platform: str) -> Layer:
        try:
            return self._store.find(reference)
        except UnknownLayer as e:
            image = registry_reference(reference)
            if image is None:
                raise UnknownLayer(
                    f"{e.message}; an image of a registry needs its host, as in HOST/REPOSITORY:TAG",
                    reference=reference,
                ) from None
        return Importer(self._builder).load(image, platform=platform or None)

    async def run(
        self,
        layers: Sequence[str],
        config: ImageConfig,
        argv: Sequence[str],
        env: Mapping[str, str],
        user: str,
        workdir: str,
        output: Output,
    ) -> str:
        args = DSecContainerRunArgs(
            container_image=layers[-1],
            memory_limit_mb=MEMORY_MB,
            disk_limit_mb=DISK_MB,
            labels={"dsec/build": "run"},
        )
        async with await self._client.run_container(args) as sandbox:
            await _exec(sandbox, argv, env, user, workdir, output)
            packed = await sandbox.pack_diff(scrub=False, refuse=False)
            return packed.layer.digest

    async def copy(self, request: Copy) -> str:
        return await asyncio.to_thread(self._copy, request)

    def _copy(self, request: Copy) -> str:
        with self._views.of(request.layers) as below:
            if not request.sources and below.is_directory(request.destination):
                return request.layers[-1]
            wanted = Wanted(name="", kind="snapshot" if request.layers else "base", command=["COPY"])
            made = self._builder.fill(
                wanted,
                "Dockerfile",
                lambda into: Placer(self._store, request, below, into).run(),
                below=request.layers,
            )
        return made.digest

    async def survey(self, layers: Sequence[str], patterns: Sequence[str]) -> str:
        return await asyncio.to_thread(survey, self._store, layers, patterns)

    async def cached(self, key: str) -> str | None:
        return await asyncio.to_thread(self._cached, key)

    def _cached(self, key: str) -> str | None:
        layer = self._store.made_of(KEY + key)
        try:
            stack = self._store.expand([layer]) if layer else []
        except LayerCorrupt:  # what it stands on was collected
            return None
        self._store.use([one.digest for one in stack])
        return layer.digest if layer else None

    async def remember(self, key: str, reference: str) -> None:
        await asyncio.to_thread(self._store.remember, KEY + key, reference)


async def _exec(
    sandbox: Sandbox, argv: Sequence[str], env: Mapping[str, str], user: str, workdir: str, output: Output
) -> None:
    tail = bytearray()

    def told(data: bytes) -> None:
        tail.extend(data)
        del tail[:-TAIL]
        output(data)

    result = await sandbox.exec(
        list(argv), cwd=workdir, env=dict(env), user=user, on_stdout=told, on_stderr=told
    )
    if not result.ok:
        said = tail.decode(errors="replace").strip()
        raise StepFailed(
            f"the command ended with {result.summary}{': ' + said if said else ''}",
            exit_code=result.exit_code,
        )


class Terminal(Progress):
    """Steps and what commands print, on stderr."""

    def step(self, stage: str, number: int, total: int, text: str, cached: bool) -> None:
        first = text.split("\n", 1)[0][:200]
        mark = "cached " if cached else ""
        errors.print(f"[{stage} {number}/{total}] {mark}{first}", markup=False, soft_wrap=True)

    def output(self, stage: str, data: bytes) -> None:
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()


def _note(line: str) -> None:
    errors.print(line, markup=False, soft_wrap=True)


def read_dockerfile(path: Path) -> bytes:
    """Raises InvalidArgument."""
    try:
        with path.open("rb") as f:
            return f.read(lines.MAX_FILE + 1)
    except OSError as e:
        raise InvalidArgument(f"reading {path}: {e.strerror}: name it with --file") from e


async def build_dockerfile(
    builder: Builder,
    client: DSecClient,
    context: Path,
    file: Path,
    wanted: Wanted,
    *,
    target: str = "",
    build_args: Mapping[str, str] | None = None,
) -> Layer:
    """The layer of what the Dockerfile makes, under its name. Raises what `dockerfile.build` raises."""
    wanted = check_wanted(wanted)
    if not context.is_dir():
        raise InvalidArgument(f"{context} is no directory: a Dockerfile's context is one")
    parsed = parse(read_dockerfile(file), file.name, _note)
    planned = plan(parsed, target=target, build_args=build_args)
    with contextlib.closing(SandboxRunner(builder, client)) as runner:
        built = await build(planned, runner, context, Terminal())
    return await asyncio.to_thread(_named, builder.store, built, wanted)


def _named(store: LayerStore, built: Built, wanted: Wanted) -> Layer:
    if not built.layers:
        raise InvalidArgument("the Dockerfile makes no file: COPY something")
    config = _over(built.config, wanted.config)
    top = built.layers[-1]
    return store.tag(top, wanted.name, kind=wanted.kind, config=config, labels=wanted.labels)


def _over(config: ImageConfig, options: ImageConfig) -> ImageConfig:
    """What the command line says wins."""
    given = {name: value for name in ("user", "workdir", "shell") if (value := getattr(options, name))}
    return msgspec.structs.replace(config, env={**config.env, **options.env}, **given)

"""A runner on plain directories: a layer is a directory that holds the whole stack's files."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsec.core.errors import InvalidArgument, UnknownLayer
from dsec.core.images import ImageConfig
from dsec.layers.dockerfile import cache, copying
from dsec.layers.dockerfile.build import Base, Output, StepFailed
from dsec.layers.dockerfile.copying import Copy, Elsewhere, Local


class DirectoryRunner:
    """RUN is a subprocess in a copy of the directory below, which it finds as $ROOT."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images: dict[str, ImageConfig] = {}
        self.known: dict[str, str] = {}
        self.ran: list[list[str]] = []
        self.running = self.most = 0

    def image(self, name: str, config: ImageConfig = ImageConfig()) -> Path:  # noqa: B008
        self.images[name] = config
        made = self.root / f"image-{name}"
        made.mkdir()
        return made

    def _new(self, layers: Sequence[str]) -> Path:
        made = self.root / f"layer-{sum(1 for _ in self.root.iterdir())}"
        if layers:
            shutil.copytree(layers[-1], made, symlinks=True)
        else:
            made.mkdir()
        return made

    async def resolve(self, reference: str, platform: str) -> Base:
        if reference not in self.images:
            raise UnknownLayer(f"no layer {reference!r}")
        path = self.root / f"image-{reference}"
        return Base(cache.tree(path), [str(path)], self.images[reference])

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
        self.ran.append([*argv])
        made = self._new(layers)
        self.running += 1
        self.most = max(self.most, self.running)
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=made / workdir.strip("/"),
            env={**env, "ROOT": str(made), "AS": user},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            assert process.stdout is not None
            said = b""
            async for line in process.stdout:
                said += line
                output(line)
            status = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            shutil.rmtree(made)
            raise
        finally:
            self.running -= 1
        if status:
            shutil.rmtree(made)
            raise StepFailed(f"the command ended with exit {status}: {said.decode()}", exit_code=status)
        return str(made)

    async def copy(self, request: Copy) -> str:
        top = Path(request.layers[-1]) if request.layers else None
        if not request.sources and top and (top / request.destination.strip("/")).is_dir():
            return str(top)
        made = self._new(request.layers)
        to = made / request.destination.strip("/")
        if not request.sources:
            to.mkdir(parents=True)
        for source in request.sources:
            if isinstance(source, Elsewhere):
                for path in self._found(source.layers, source.patterns):
                    self._place(path, path.name, request, made)
            elif isinstance(source, Local):
                self._place(source.path, source.name, request, made, source)
            else:
                text = self.root / "text"
                text.write_text(source.body)
                self._place(text, source.name, request, made)
        return str(made)

    def _place(self, path: Path, name: str, copy: Copy, made: Path, local: Local | None = None) -> None:
        there = (made / copy.destination.strip("/")).is_dir()
        where = copying.place(name, is_directory=path.is_dir(), destination=copy.destination, is_there=there)
        to = made / where.strip("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            shutil.copy2(path, to)
            return

        def left_out(here: str, names: list[str]) -> list[str]:
            inside = [(n, str((Path(here) / n).relative_to(path))) for n in names]
            return [n for n, p in inside if local and local.leaves_out(p)]

        shutil.copytree(path, to, symlinks=True, dirs_exist_ok=True, ignore=left_out)

    def _found(self, layers: Sequence[str], patterns: Sequence[str]) -> list[Path]:
        found = [sorted(Path(layers[-1]).glob(p)) if p else [Path(layers[-1])] for p in patterns]
        if not all(found):
            raise InvalidArgument(f"{patterns}: there is no such file in the stage")
        return [path for paths in found for path in paths]

    async def survey(self, layers: Sequence[str], patterns: Sequence[str]) -> str:
        found = self._found(layers, patterns)
        return hashlib.sha256("".join(path.name + cache.tree(path) for path in found).encode()).hexdigest()

    async def cached(self, key: str) -> str | None:
        return self.known.get(key)

    async def remember(self, key: str, reference: str) -> None:
        self.known[key] = reference

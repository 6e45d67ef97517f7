"""Builds a plan, stage by stage, each step by a `Runner` or from what a runner remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from dsec.core.errors import DSecError, InvalidArgument
from dsec.core.images import ImageConfig
from dsec.layers.dockerfile import cache, copying, ignore
from dsec.layers.dockerfile.copying import Context, Copy, Elsewhere, Local, Source, Text
from dsec.layers.dockerfile.faults import StepFailed as StepFailed  # what a runner raises
from dsec.layers.dockerfile.faults import placed
from dsec.layers.dockerfile.parser import Parsed
from dsec.layers.dockerfile.plan import SCRATCH, Plan, Planned
from dsec.layers.dockerfile.state import DEFAULT_PATH, History, Metadata, State, run_argv, run_env
from dsec.layers.dockerfile.words import expand_body

SIDE_BY_SIDE: Final = 4
"""Stages."""
Output = Callable[[bytes], None]


class Base(msgspec.Struct, frozen=True):
    """What FROM stands for."""

    digest: str
    """Of the image: the same for the same content, whatever its name."""
    layers: list[str]
    """Bottom to top."""
    config: ImageConfig = ImageConfig()


class Runner(Protocol):
    """Runs the steps. A layer is known by a reference; a stack is a list of them, bottom to top.

    All methods may be called side by side. What a call that fails or is cancelled began is gone after it.
    """

    async def resolve(self, reference: str, platform: str) -> Base:
        """The image of FROM or `COPY --from`. platform: empty for this machine's."""
        ...

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
        """A layer of what the command changed. Raises StepFailed when it does not end with 0."""
        ...

    async def copy(self, request: Copy) -> str:
        """A layer of what is put there; the top layer again when nothing has to be."""
        ...

    async def survey(self, layers: Sequence[str], patterns: Sequence[str]) -> str:
        """A digest of what patterns match in a stack. Raises InvalidArgument when one matches nothing."""
        ...

    async def cached(self, key: str) -> str | None:
        """The layer that was remembered, if it is whole."""
        ...

    async def remember(self, key: str, reference: str) -> None: ...


class Progress:
    """Told how a build goes. Subclass what you want to see."""

    def step(self, stage: str, number: int, total: int, text: str, cached: bool) -> None:
        """An instruction begins; `cached`: it was done before."""

    def output(self, stage: str, data: bytes) -> None:
        """Of a command, as it comes."""


class Built(msgspec.Struct, frozen=True):
    layers: list[str]
    """Bottom to top; empty for `FROM scratch` alone."""
    config: ImageConfig
    exposed: list[str]
    history: list[History]
    """An entry for an instruction, those of stages below first."""
    cached: int
    """Steps that were done before."""
    made: int


async def build(plan: Plan, runner: Runner, context: Path, progress: Progress | None = None) -> Built:
    """Raises InvalidArgument with the line that is at fault, StepFailed, and what the runner raises.

    context: the directory that COPY takes from, with its .dockerignore. Stages that do not need each other
    are built side by side; the first that fails ends the others.
    """
    job = _Build(plan, runner, Context(context, read_ignore(context, plan)), progress or Progress())
    try:
        await job.run()
    except BaseExceptionGroup as e:
        raise _first(e) from None
    state = job.done[plan.target].result()
    return Built(state.layers, state.config, state.exposed, state.history, job.cached, job.made)


def read_ignore(context: Path, plan: Plan) -> ignore.Ignore:
    """`NAME.dockerignore` beside the Dockerfile's name, or .dockerignore."""
    own = Path(plan.dockerfile.file).name + ".dockerignore"
    for name in (own, ".dockerignore"):
        try:
            with (context / name).open("rb") as f:
                return ignore.parse(f.read(ignore.MAX_FILE + 1), name)
        except FileNotFoundError:
            continue
        except OSError as e:
            raise InvalidArgument(f"reading {context / name}: {e.strerror}: mend it, or take it away") from e
    return ignore.Ignore()


def _first(group: BaseExceptionGroup) -> BaseException:
    """The one that a user should see."""
    flat: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        else:
            flat.append(one)
    return next((e for e in flat if isinstance(e, DSecError)), flat[0])


class _Build:
    def __init__(self, plan: Plan, runner: Runner, context: Context, progress: Progress) -> None:
        self._plan = plan
        self._runner = runner
        self._context = context
        self._progress = progress
        self._metadata = Metadata(plan)
        self._few = asyncio.Semaphore(SIDE_BY_SIDE)
        self.done: dict[int, asyncio.Task[State]] = {}
        self.cached = self.made = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, planned in self._plan.stages.items():  # in order: what one uses is there before it
                self.done[number] = group.create_task(self._stage(planned))

    async def _stage(self, planned: Planned) -> State:
        for number in planned.uses:
            await asyncio.shield(self.done[number])
        async with self._few:
            start = planned.stage.start
            self._tell(planned, 0, f"FROM {start.text}", False)
            state = await self._start(planned)
            for number, parsed in enumerate(planned.stage.body, 1):
                await self._step(planned, state, number, parsed)
            return state

    async def _start(self, planned: Planned) -> State:
        if planned.on >= 0:
            return self.done[planned.on].result().heir()
        if planned.base == SCRATCH:
            return State(key=cache.of_base(SCRATCH, []), config=ImageConfig(env={"PATH": DEFAULT_PATH}))
        with placed(self._plan.dockerfile.at(planned.stage.start)):
            base = await self._runner.resolve(planned.base, planned.platform)
        config = base.config
        if "PATH" not in config.env:
            config = msgspec.structs.replace(config, env={"PATH": DEFAULT_PATH, **config.env})
        return State([*base.layers], cache.of_base(base.digest, base.layers), config)

    async def _step(self, planned: Planned, state: State, number: int, parsed: Parsed) -> None:
        top = len(state.layers)
        if parsed.name == "RUN":
            await self._run(planned, state, number, parsed)
        elif parsed.name in {"COPY", "ADD"}:
            await self._copy(planned, state, number, parsed)
        else:
            self._metadata.apply(state, parsed)
            if parsed.name != "WORKDIR":
                self._tell(planned, number, _text(parsed), False)
            elif state.workdir != "/":
                request = Copy(layers=[*state.layers], sources=[], destination=state.workdir + "/")
                await self._put(planned, state, number, parsed, request, [])
        made = state.layers[-1] if len(state.layers) > top else ""
        state.history.append(History(_text(parsed), made))

    def _tell(self, planned: Planned, number: int, text: str, cached: bool) -> None:
        self._progress.step(planned.title, number, len(planned.stage.body), text, cached)

    async def _run(self, planned: Planned, state: State, number: int, parsed: Parsed) -> None:
        argv, config = run_argv(state, parsed), state.config
        env, at = run_env(state, self._plan), self._plan.dockerfile.at(parsed)
        if not state.layers:
            raise at.bad("there is nothing to run on scratch: COPY something first")
        counts = run_env(state, self._plan, key=True)
        key = cache.of_run(state.key, argv, counts, config.user, state.workdir)

        async def make() -> str:
            def output(data: bytes) -> None:
                self._progress.output(planned.title, data)

            run = self._runner.run
            return await run([*state.layers], config, argv, env, config.user, state.workdir, output)

        await self._made(planned, state, number, parsed, key, make)

    async def _copy(self, planned: Planned, state: State, number: int, parsed: Parsed) -> None:
        at = self._plan.dockerfile.at(parsed)
        expand, values = self._metadata.expand, state.values
        *sources, last = [expand(word, values, parsed) for word in self._paths(parsed)]
        flags = {name: expand(parsed.flags.get(name, ""), values, parsed) for name in ("chown", "chmod")}
        found = await self._sources(planned, state, parsed, sources)
        request = Copy(
            layers=[*state.layers],
            sources=found,
            destination=copying.destination(last, state.workdir, at),
            is_add=parsed.name == "ADD",
            **flags,
        )
        contents = await asyncio.to_thread(copying.contents, copying.check(request, at), at)
        for source in found:
            if isinstance(source, Elsewhere):
                with placed(at):
                    contents.append(await self._runner.survey(source.layers, source.patterns))
        await self._put(planned, state, number, parsed, request, contents)

    @staticmethod
    def _paths(parsed: Parsed) -> list[str]:
        docs = {doc.word for doc in parsed.heredocs}
        return [word for word in parsed.words if word not in docs]

    async def _sources(
        self, planned: Planned, state: State, parsed: Parsed, patterns: list[str]
    ) -> list[Source]:
        at, escape = self._plan.dockerfile.at(parsed), self._plan.dockerfile.escape
        word = parsed.flags.get("from", "")
        texts = [
            Text(d.name, d.body if d.raw else expand_body(d.body, state.values, escape, at))
            for d in parsed.heredocs
        ]
        if not word:
            found: list[Local] = await asyncio.to_thread(self._context.expand, patterns, at)
            return [*texts, *found]
        if texts:
            raise at.bad("--from and a heredoc do not go together: write two instructions")
        with placed(at):
            layers = await self._layers_of(planned, word)
        clean = tuple(copying.inside(pattern, at) for pattern in patterns)
        return [Elsewhere(tuple(layers), clean)]

    async def _layers_of(self, planned: Planned, word: str) -> list[str]:
        number = self._plan.find(word, planned.number)
        if number is not None:
            return self.done[number].result().layers
        return (await self._runner.resolve(word, planned.platform)).layers

    async def _put(
        self,
        planned: Planned,
        state: State,
        number: int,
        parsed: Parsed,
        request: Copy,
        contents: list[str],
    ) -> None:
        key = cache.of_copy(
            state.key, parsed.name, contents, request.destination, request.chown, request.chmod
        )
        await self._made(planned, state, number, parsed, key, lambda: self._runner.copy(request))

    async def _made(
        self,
        planned: Planned,
        state: State,
        number: int,
        parsed: Parsed,
        key: str,
        make: Callable[[], Awaitable[str]],
    ) -> None:
        """Puts the step's layer on the state, made now or before."""
        known = await self._runner.cached(key)
        self._tell(planned, number, _text(parsed), known is not None)
        if known is None:
            with placed(self._plan.dockerfile.at(parsed)):
                known = await make()
            await self._runner.remember(key, known)
            self.made += 1
        else:
            self.cached += 1
        state.key = key
        if known not in state.layers[-1:]:
            state.layers.append(known)


def _text(parsed: Parsed) -> str:
    flags = "".join(f"--{name}={value} " for name, value in parsed.flags.items())
    return f"{parsed.name} {flags}{parsed.text}"

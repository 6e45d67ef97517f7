"""Plans and builds: Docker's rules on a runner that really copies and really runs."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from tests.layers.dockerfile.runner import DirectoryRunner

from dsec.core.errors import InvalidArgument, UnknownLayer
from dsec.core.images import ImageConfig
from dsec.layers.dockerfile.build import Built, Progress, StepFailed, build
from dsec.layers.dockerfile.parser import parse
from dsec.layers.dockerfile.plan import Plan, plan


@pytest.fixture
def runner(tmp_path: Path) -> DirectoryRunner:
    (tmp_path / "layers").mkdir()
    made = DirectoryRunner(tmp_path / "layers")
    config = ImageConfig(env={"PATH": os.environ["PATH"], "B": "base"}, cmd=["old"], workdir="/w")
    (made.image("base", config) / "w").mkdir()
    return made


@pytest.fixture
def context(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    (root / "d/e").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "c.md", "d/f", "d/e/g"):
        (root / name).write_text(f"{name}\n")
    (root / "link").symlink_to("d/f")
    (root / "out").symlink_to("/etc/hostname")
    (root / "up").symlink_to("../../../../../etc")
    return root


def planned(text: str, target: str = "", **build_args: str) -> Plan:
    return plan(parse(text.encode()), target=target, build_args=build_args)


async def made(
    text: str, runner: DirectoryRunner, context: Path, target: str = "", **build_args: str
) -> tuple[Built, Path]:
    built = await build(planned(text, target, **build_args), runner, context)
    return built, Path(built.layers[-1])


def files(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@pytest.mark.parametrize(
    ("copy", "there"),
    [
        ("COPY a.txt /x", ["x"]),
        ("COPY a.txt /x/", ["x/a.txt"]),
        ("COPY a.txt /w", ["w/a.txt"]),
        ("COPY a.txt .", ["w/a.txt"]),
        ("COPY a.txt sub/n", ["w/sub/n"]),
        ("COPY a.txt ../n", ["n"]),
        ("COPY *.txt /x/", ["x/a.txt", "x/b.txt"]),
        ("COPY ?.md /x/y/", ["x/y/c.md"]),
        ("COPY d /x", ["x/e/g", "x/f"]),
        ("COPY d/ /x/", ["x/e/g", "x/f"]),
        ("COPY d a.txt /x/", ["x/a.txt", "x/e/g", "x/f"]),
        ("COPY d/* /x/", ["x/f", "x/g"]),
        ("COPY /d/f /x", ["x"]),
        ("COPY ./d/../a.txt /x", ["x"]),
        ("COPY link /x/", ["x/link"]),
        ("COPY [a-b].txt /x/", ["x/a.txt", "x/b.txt"]),
        ('COPY ["a.txt", "/with space"]', ["with space"]),
        ("COPY <<EOF /x\n$B\nEOF", ["x"]),
        ("COPY <<A <<B a.txt /x/\n1\nA\n2\nB", ["x/A", "x/B", "x/a.txt"]),
        ("ADD d /x", ["x/e/g", "x/f"]),
        ("ARG N=a\nCOPY ${N}.txt /$N", ["a"]),
        ("WORKDIR v\nWORKDIR u\nCOPY a.txt .", ["w/v/u/a.txt"]),
    ],
)
async def test_copy(copy: str, there: list[str], runner: DirectoryRunner, context: Path) -> None:
    _, root = await made(f"FROM base\n{copy}\n", runner, context)
    assert list(files(root)) == there


async def test_copied_contents(runner: DirectoryRunner, context: Path) -> None:
    text = "FROM base\nCOPY link /l\nCOPY <<EOF <<'RAW' /h/\n$B\nEOF\n$B\nRAW\n"
    _, root = await made(text, runner, context)
    assert files(root) == {"l": "d/f\n", "h/EOF": "base\n", "h/RAW": "$B\n"}


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("COPY ../a /x", "leads out of the context"),
        ("COPY d/../../a /x", "leads out of the context"),
        ("COPY none /x", "'none': it is not in the context"),
        ("COPY *.none /x/", "it is not in the context"),
        ("COPY out /x", "'out': it is not in the context"),
        ("COPY up/passwd /x", "it is not in the context"),
        ("COPY " + "x" * 300 + " /x", "File name too long"),
        ("COPY a.txt/b /x", "it is not in the context"),
        ("COPY --from=base /none /x", "there is no such file"),
        ("COPY --from=none /none /x", "no layer 'none'"),
        ("COPY *.txt /x", "it must end with a slash"),
        ("COPY a.txt $none", "the destination is empty"),
        ("COPY --chmod=u+x a.txt /x", "in octal"),
        ("COPY --chown=a:b:c a.txt /x", "USER or USER:GROUP"),
        ("COPY --from=$B a.txt /x", "--from takes no variables"),
        ("ADD https://h.example/x /x", "only local files"),
        ("ADD git@h.example:x.git /x", "only local files"),
        ("COPY **/g /x", "'**' in a source"),
        ("USER a b", "a name or number"),
        ("EXPOSE many", "such as 80"),
        ("STOPSIGNAL x", "such as SIGTERM"),
        ("ENV a-b=1", "is no variable name"),
        ("ARG A=${B", "has no end"),
        ('SHELL ["sh"]', "absolute path"),
    ],
)
async def test_refused(step: str, told: str, runner: DirectoryRunner, context: Path) -> None:
    (context.parent / "etc").mkdir()
    (context.parent / "etc/passwd").write_text("no")
    with pytest.raises(InvalidArgument) as e:
        await made(f"FROM base\n\n{step}\n", runner, context)
    assert told in e.value.message and e.value.message.startswith("Dockerfile:3: ")


async def test_environment_of_steps(runner: DirectoryRunner, context: Path) -> None:
    text = """\
    ARG V=global
    ARG W=hidden
    FROM base
    ARG V
    ARG D=default
    ARG B=arg
    RUN echo $V,$W,$D,$B,$AS,$TARGETOS > one
    ENV abc=hello
    ENV abc=bye def=$abc
    ENV ghi=$abc D=env
    USER ${def}
    WORKDIR $D
    ARG TARGETOS
    RUN echo $abc,$def,$ghi,$D,$AS,$TARGETOS,$http_proxy > two
    SHELL ["/bin/bash", "-euc"]
    RUN [[ a == a ]] && echo $- > three
    RUN ["sh", "-c", "echo $abc > four"]
    RUN <<EOF
    echo body > five
    EOF
    RUN cat <<EOF > six
    $abc
    EOF
    RUN <<EOF
    #!/usr/bin/env python3
    open("seven", "w").write("script")
    EOF
    """.replace("\n    ", "\n")
    _, root = await made(text.lstrip(), runner, context, D="given", http_proxy="p")
    found = files(root)
    assert found["w/one"] == "global,,given,base,,\n"
    assert found["w/env/two"] == "bye,hello,bye,env,hello,linux,p\n"
    assert "e" in found["w/env/three"] and found["w/env/four"] == "bye\n"
    assert found["w/env/five"] == "body\n" and found["w/env/six"] == "bye\n"
    assert found["w/env/seven"] == "script"


async def test_result(runner: DirectoryRunner, context: Path) -> None:
    text = """\
FROM base
LABEL a=1 "b c"="d e"
EXPOSE 80 53/udp
STOPSIGNAL SIGQUIT
ENTRYPOINT exec top
RUN true
"""
    built, _ = await made(text, runner, context)
    config = built.config
    assert config.entrypoint == ["/bin/sh", "-c", "exec top"] and config.cmd == []
    assert config.labels == {"a": "1", "b c": "d e"} and config.stop_signal == "SIGQUIT"
    assert built.exposed == ["80/tcp", "53/udp"] and config.workdir == "/w"
    assert [bool(h.layer) for h in built.history] == [False] * 4 + [True]
    assert built.history[-1].created_by == "RUN true" and built.layers[-1] == built.history[-1].layer
    kept, _ = await made('FROM base\nCMD ["x"]\nENTRYPOINT ["y"]\n', runner, context)
    assert (kept.config.cmd, kept.config.entrypoint) == (["x"], ["y"])
    plain, _ = await made("FROM base\n", runner, context)
    assert plain.config.cmd == ["old"] and plain.made == 0


STAGES = """\
FROM base AS one
RUN echo 1 > /$ROOT/f1
FROM base AS two
RUN echo 2 > $ROOT/f2
FROM one AS three
COPY --from=two /f2 /
FROM base AS unneeded
RUN exit 1
FROM base
COPY --from=2 f1 f2 /all/
COPY --from=other /here /
"""


async def test_stages(runner: DirectoryRunner, context: Path) -> None:
    (runner.image("other") / "here").write_text("other")
    built, root = await made(STAGES, runner, context)
    assert files(root) == {"all/f1": "1\n", "all/f2": "2\n", "here": "other"}
    assert built.made == 5
    _, root = await made(STAGES, runner, context, target="TWO")
    assert files(root) == {"f2": "2\n"}
    for target in ("four", "9", "base"):
        with pytest.raises(InvalidArgument, match=r"no stage .*one, two, three, unneeded"):
            planned(STAGES, target)
    with pytest.raises(StepFailed, match=r"^Dockerfile:8: RUN: the command ended with exit 1") as e:
        await made(STAGES, runner, context, target="unneeded")
    assert e.value.details == {"exit_code": 1, "line": 8}
    for text, told in (
        ("FROM none\n", "none"),
        ("FROM base\nCOPY --from=later a /\nFROM base AS later\n", "later"),
    ):
        with pytest.raises(UnknownLayer, match=rf"^Dockerfile:\d: .*{told}"):
            await made(text, runner, context, target="0")
    with pytest.raises(InvalidArgument, match="is empty"):
        planned("ARG X\nFROM $X\n")
    assert planned("ARG X=a\nFROM ${X:-b}\n", X="c").stages[0].base == "c"
    assert planned("FROM --platform=$TARGETPLATFORM base").stages[0].platform.startswith("linux/")


async def test_scratch(runner: DirectoryRunner, context: Path) -> None:
    built, root = await made("FROM scratch\nCOPY d /\n", runner, context)
    assert files(root) == {"e/g": "d/e/g\n", "f": "d/f\n"} and len(built.layers) == 1
    with pytest.raises(InvalidArgument, match="nothing to run on scratch"):
        await made("FROM scratch\nRUN x\n", runner, context)


CACHED = """\
FROM base
ARG A=1
RUN echo first > first
COPY d /d
RUN echo second > second
"""


@pytest.mark.parametrize(
    ("change", "made_again"),
    [
        ("nothing", 0),
        ("time", 0),
        ("label", 0),
        ("outside", 0),
        ("content", 2),
        ("name", 2),
        ("mode", 2),
        ("arg", 3),
        ("env", 3),
        ("user", 3),
        ("workdir", 4),
        ("shell", 3),
        ("base", 3),
        ("last", 1),
        ("chmod", 2),
        ("proxy", 0),
    ],
)
async def test_cache(change: str, made_again: int, runner: DirectoryRunner, context: Path) -> None:
    first, _ = await made(CACHED, runner, context)
    assert (first.made, first.cached) == (3, 0)
    text, args = CACHED, {}
    before = {"label": "LABEL x=1", "env": "ENV X=1", "user": "USER u", "workdir": "WORKDIR /v"}
    before |= {"shell": 'SHELL ["/bin/bash", "-c"]'}
    if change in before:
        text = text.replace("ARG", before[change] + "\nARG")
    elif change == "time":
        os.utime(context / "d/f", (1, 1))
    elif change == "outside":
        (context / "a.txt").write_text("other")
    elif change == "content":
        (context / "d/f").write_text("D/f\n")
    elif change == "name":
        (context / "d/f").rename(context / "d/ff")
    elif change == "mode":
        (context / "d/f").chmod(0o700)
    elif change == "arg":
        args = {"A": "2"}
    elif change == "proxy":
        args = {"HTTP_PROXY": "http://p.example"}
    elif change == "base":
        (runner.root / "image-base/new").write_text("")
    elif change == "last":
        text = text.replace("echo second", "echo other")
    elif change == "chmod":
        text = text.replace("COPY", "COPY --chmod=700")
    again, _ = await made(text, runner, context, **args)
    assert again.made == made_again
    assert (await made(text, runner, context, **args))[0].layers == again.layers


async def test_cache_of_another_stage(runner: DirectoryRunner, context: Path) -> None:
    """What is copied from a stage counts, not how it was made."""
    text = "FROM base AS a\nRUN echo 1 > /$ROOT/f; echo %s > $ROOT/other\nFROM base\nCOPY --from=a /f /\n"
    await made(text % "x", runner, context)
    again, _ = await made(text % "y", runner, context)
    assert (again.made, again.cached) == (1, 1)


async def test_dockerignore(runner: DirectoryRunner, context: Path) -> None:
    (context / ".dockerignore").write_text("d\n!d/e/g\n*.txt\n.dockerignore\nlink\nout\nup\n")
    _, root = await made("FROM base\nCOPY . /x\n", runner, context)
    assert list(files(root)) == ["x/c.md", "x/d/e/g"]
    (context / "a.txt").write_text("no part of it")
    assert (await made("FROM base\nCOPY . /x\n", runner, context))[0].made == 0
    (context / "Other.dockerignore").mkdir()
    with pytest.raises(InvalidArgument, match=r"Other\.dockerignore: Is a directory"):
        await build(plan(parse(b"FROM base", "Other")), runner, context)
    with pytest.raises(InvalidArgument, match="leaves it out"):
        await made("FROM base\nCOPY a.txt /x\n", runner, context)
    (context / "Dockerfile.dockerignore").write_text("d\n")
    _, root = await made("FROM base\nCOPY *.txt /x/\n", runner, context)
    assert list(files(root)) == ["x/a.txt", "x/b.txt"]


async def test_stages_side_by_side(runner: DirectoryRunner, context: Path) -> None:
    """Each waits for the other's sign of life: one after the other they would never end."""
    meet = context.parent / "meet"
    meet.mkdir()
    wait = "touch {0}/{1}; while [ ! -e {0}/{2} ]; do :; done"
    text = (
        f"FROM base AS a\nRUN {wait.format(meet, 'a', 'b')}; echo a > a\n"
        f"FROM base AS b\nRUN {wait.format(meet, 'b', 'a')}; echo b > b\n"
        "FROM base\nCOPY --from=a /w/a /\nCOPY --from=b /w/b /\n"
    )
    async with asyncio.timeout(30):
        _, root = await made(text, runner, context)
    assert files(root) == {"a": "a\n", "b": "b\n"} and runner.most == 2


async def test_a_failure_ends_the_others(runner: DirectoryRunner, context: Path) -> None:
    mark = context.parent / "mark"
    text = (
        f"FROM base AS a\nRUN touch {mark}; exec sleep 1000\n"
        f"FROM base AS b\nRUN while [ ! -e {mark} ]; do :; done; exit 3\n"
        "FROM base\nCOPY --from=a /w /\nCOPY --from=b /w /\n"
    )
    before = time.monotonic()
    with pytest.raises(StepFailed, match="exit 3"):
        await made(text, runner, context)
    assert time.monotonic() - before < 60 and runner.running == 0 and not runner.known
    assert [path.name for path in runner.root.iterdir()] == ["image-base"]


async def test_cancelled(runner: DirectoryRunner, context: Path) -> None:
    mark = context.parent / "mark"
    task = asyncio.create_task(made(f"FROM base\nRUN touch {mark}; exec sleep 1000\n", runner, context))
    async with asyncio.timeout(30):
        while not mark.exists():
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runner.running == 0 and [path.name for path in runner.root.iterdir()] == ["image-base"]


async def test_progress(runner: DirectoryRunner, context: Path) -> None:
    seen: list[object] = []

    class Seen(Progress):
        def step(self, stage: str, number: int, total: int, text: str, cached: bool) -> None:
            seen.append((stage, number, total, text, cached))

        def output(self, stage: str, data: bytes) -> None:
            seen.append(data)

    text = "FROM base AS x\nRUN echo said\nENV a=1\n"
    await build(planned(text), runner, context, Seen())
    assert seen == [
        ("x", 0, 2, "FROM base AS x", False),
        ("x", 1, 2, "RUN echo said", False),
        b"said\n",
        ("x", 2, 2, "ENV a=1", False),
    ]
    await build(planned(text), runner, context, Seen())
    assert seen[5] == ("x", 1, 2, "RUN echo said", True) and seen.count(b"said\n") == 1

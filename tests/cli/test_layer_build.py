"""COPY and ADD as layers of a real store: no sandbox has a part in it."""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.cli.layer_build import SandboxRunner
from dsec.cli.layer_copy import View
from dsec.client import DSecClient
from dsec.core.errors import InvalidArgument, UnknownLayer
from dsec.layers.build import Builder, Wanted
from dsec.layers.dockerfile.copying import Context, Copy, Elsewhere, Source, Text
from dsec.layers.dockerfile.faults import At
from dsec.layers.erofs.tree import Directory, File, Symlink
from dsec.layers.store import LayerStore

AT = At("Dockerfile", 1, "COPY")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LayerStore]:
    with LayerStore(tmp_path / "store") as made:
        yield made


@pytest.fixture
def runner(store: LayerStore) -> Iterator[SandboxRunner]:
    client = DSecClient(url="http://127.0.0.1:1", token="none")
    with contextlib.closing(SandboxRunner(Builder(store), client)) as made:
        yield made


@pytest.fixture
def base(store: LayerStore, tmp_path: Path) -> str:
    root = tmp_path / "base"
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nme:x:7:8::/:/bin/sh\nbad:x:y\n")
    (root / "etc/group").write_text("root:x:0:\nteam:x:9:me\n")
    (root / "usr/lib").mkdir(parents=True)
    (root / "usr/lib").chmod(0o751)
    (root / "usr/lib/old").write_text("old")
    (root / "lib").symlink_to("usr/lib")
    (root / "abs").symlink_to("/usr/../usr/lib")
    (root / "loop").symlink_to("loop")
    (root / "big").write_bytes(b"x" * 50_000)
    os.link(root / "big", root / "big2")
    return Builder(store).from_directory(root, Wanted(name="base", kind="base")).digest


@pytest.fixture
def context(tmp_path: Path) -> Context:
    root = tmp_path / "context"
    (root / "d/e").mkdir(parents=True)
    (root / "d").chmod(0o711)
    (root / "f").write_text("f")
    (root / "f").chmod(0o640)
    (root / "d/g").write_bytes(b"g" * 10_000)
    os.link(root / "d/g", root / "d/e/hard")
    (root / "d/s").symlink_to("/nowhere")
    with tarfile.open(root / "t.tar", "w") as tar:
        tar.add(root / "f", "deep/f")
    return Context(root)


def copy(
    base: str, sources: list[Source], to: str, *, add: bool = False, chown: str = "", chmod: str = ""
) -> Copy:
    layers = [base] if base else []
    return Copy(layers=layers, sources=sources, destination=to, is_add=add, chown=chown, chmod=chmod)


def local(context: Context, *patterns: str) -> list[Source]:
    return [*context.expand(patterns, AT)]


def shown(store: LayerStore, layers: list[str]) -> dict[str, str]:
    """Every path of the stack: mode, owner, and what it holds."""
    found: dict[str, str] = {}
    with View(store, layers) as view:
        waiting: list[tuple[str, Directory]] = [("", view.tree.root)]
        while waiting:
            path, here = waiting.pop()
            for name, child in here.children.items():
                full = f"{path}/{name.decode()}"
                found[full] = f"{stat.S_IMODE(child.mode):o} {child.uid}:{child.gid}"
                if isinstance(child, Directory):
                    waiting.append((full, child))
                elif isinstance(child, File):
                    found[full] += " " + b"".join(view.read(child))[:8].decode()
                elif isinstance(child, Symlink):
                    found[full] += f" -> {child.target.decode()}"
    return found


async def put(runner: SandboxRunner, request: Copy) -> dict[str, str]:
    """What is new or different in the stack."""
    store = runner._store
    before = shown(store, request.layers)
    made = await runner.copy(request)
    return {p: s for p, s in shown(store, [*request.layers, made]).items() if before.get(p) != s}


async def test_files(runner: SandboxRunner, base: str, context: Context) -> None:
    f = local(context, "f")
    assert await put(runner, copy(base, f, "/x")) == {"/x": "640 0:0 f"}
    assert await put(runner, copy(base, f, "/etc")) == {"/etc/f": "640 0:0 f"}
    assert await put(runner, copy(base, f, "/n/m/")) == {
        "/n": "755 0:0",
        "/n/m": "755 0:0",
        "/n/m/f": "640 0:0 f",
    }
    assert await put(runner, copy(base, f, "/usr/lib/old")) == {"/usr/lib/old": "640 0:0 f"}
    # Behind a link of the base, which stays a link; the directory keeps its mode.
    for to in ("/lib/new", "/abs/new", "/lib/../lib/new"):
        assert await put(runner, copy(base, f, to)) == {"/usr/lib/new": "640 0:0 f"}
    text: list[Source] = [Text("EOF", "words")]
    assert await put(runner, copy(base, text, "/x", chmod="0755")) == {"/x": "755 0:0 words"}
    assert await put(runner, copy("", f, "/x")) == {"/x": "640 0:0 f"}


async def test_directories(runner: SandboxRunner, base: str, context: Context) -> None:
    d = local(context, "d")
    assert await put(runner, copy(base, d, "/usr/lib")) == {
        "/usr/lib/e": "755 0:0",
        "/usr/lib/e/hard": "644 0:0 gggggggg",
        "/usr/lib/g": "644 0:0 gggggggg",
        "/usr/lib/s": "777 0:0 -> /nowhere",
    }
    new = await put(runner, copy(base, d, "/n", chown="me", chmod="700"))
    assert new == {
        "/n": "700 7:8",
        "/n/e": "700 7:8",
        "/n/e/hard": "700 7:8 gggggggg",
        "/n/g": "700 7:8 gggggggg",
        "/n/s": "777 7:8 -> /nowhere",
    }
    assert (await put(runner, copy(base, d, "/n")))["/n"] == "711 0:0"
    assert await put(runner, copy(base, [], "/w/v/")) == {"/w": "755 0:0", "/w/v": "755 0:0"}
    assert await runner.copy(copy(base, [], "/lib/")) == base  # nothing to be done


@pytest.mark.parametrize(
    ("chown", "owner"),
    [("me", "7:8"), ("me:team", "7:9"), ("55", "55:55"), ("55:root", "55:0"), ("1:2", "1:2")],
)
async def test_chown(chown: str, owner: str, runner: SandboxRunner, base: str, context: Context) -> None:
    made = await put(runner, copy(base, local(context, "f"), "/n/x", chown=chown))
    assert made == {"/n": f"755 {owner}", "/n/x": f"640 {owner} f"}


async def test_add(runner: SandboxRunner, base: str, context: Context) -> None:
    t = local(context, "t.tar")
    assert await put(runner, copy(base, t, "/u", add=True)) == {
        "/u": "755 0:0",
        "/u/deep": "755 0:0",
        "/u/deep/f": "640 0:0 f",
    }
    assert list(await put(runner, copy(base, t, "/u"))) == ["/u"]
    assert list(await put(runner, copy(base, local(context, "f"), "/u", add=True))) == ["/u"]


async def test_from_another_stack(
    runner: SandboxRunner, store: LayerStore, base: str, context: Context
) -> None:
    """Its data is not copied: the layer refers to the same blobs."""
    made = await runner.copy(copy(base, local(context, "d"), "/n", chown="3:4"))
    stack = (base, made)
    request = copy(base, [Elsewhere(stack, ("n", "big*"))], "/z/")
    blobs = {path.name for path in store.blobs.iterdir()}
    assert await put(runner, request) == {
        "/z": "711 3:4",
        "/z/big": "644 0:0 xxxxxxxx",
        "/z/big2": "644 0:0 xxxxxxxx",
        "/z/e": "755 3:4",
        "/z/e/hard": "644 3:4 gggggggg",
        "/z/g": "644 3:4 gggggggg",
        "/z/s": "777 3:4 -> /nowhere",
    }
    assert {path.name for path in store.blobs.iterdir()} == blobs
    through_link = copy(base, [Elsewhere(stack, ("lib/o?d",))], "/y")
    assert await put(runner, through_link) == {"/y": "644 0:0 old"}
    whole = copy("", [Elsewhere(stack, ("",))], "/")
    assert (await put(runner, whole)).keys() == shown(store, [*stack]).keys()


async def test_steps_on_one_another(runner: SandboxRunner, base: str, context: Context) -> None:
    """What is kept of the step before is never another stack's."""
    f = local(context, "f")
    one = await runner.copy(copy(base, f, "/n/"))
    on_one = Copy(layers=[base, one], sources=f, destination="/n")
    assert await put(runner, on_one) == {}  # /n is a directory there, and has it
    assert await put(runner, copy(base, f, "/n")) == {"/n": "640 0:0 f"}
    assert await put(runner, on_one) == {}


async def test_survey(runner: SandboxRunner, base: str, context: Context) -> None:
    """It tells contents, names and owners, not what lies beside."""
    one = await runner.copy(copy(base, local(context, "f"), "/n/f"))
    same = await runner.copy(copy(one, local(context, "f"), "/other"))
    owned = await runner.copy(copy(base, local(context, "f"), "/n/f", chown="1"))
    stacks = ([base, one], [base, one, same], [base, owned])
    found = [await runner.survey(stack, ["n/f", "etc"]) for stack in stacks]
    assert found[0] == found[1] != found[2]
    with pytest.raises(InvalidArgument, match="/none: there is no such file"):
        await runner.survey([base], ["none"])


@pytest.mark.parametrize(
    ("sources", "to", "chown", "told"),
    [
        ("d", "/big", "", "/big is no directory"),
        ("f", "/big/x", "", "/big is no directory"),
        ("f", "/loop/x", "", "symbolic links on the way"),
        ("f", "/x", "you", "no 'you' in /etc/passwd"),
        ("f", "/x", "bad", "no 'bad' in /etc/passwd"),
        ("f", "/x", "me:none", "no 'none' in /etc/group"),
        ("f", "/x", "4294967295", "too large"),
    ],
)
async def test_refused(
    sources: str, to: str, chown: str, told: str, runner: SandboxRunner, base: str, context: Context
) -> None:
    before = len(runner._store.list())
    with pytest.raises(InvalidArgument, match=told):
        await runner.copy(copy(base, local(context, sources), to, chown=chown))
    assert len(runner._store.list()) == before
    (context.root / "d/etc").write_text("a file where a directory is")
    with pytest.raises(InvalidArgument, match="/etc is a directory"):
        await runner.copy(copy(base, local(context, "d"), "/"))


async def test_what_is_remembered(
    runner: SandboxRunner, store: LayerStore, base: str, context: Context
) -> None:
    made = await runner.copy(copy(base, local(context, "f"), "/x"))
    assert await runner.cached("k") is None
    await runner.remember("k", made)
    assert await runner.cached("k") == made
    store.file(made).unlink()
    assert await runner.cached("k") is None
    store.file(made).touch()
    store.remove(made)
    assert await runner.cached("k") is None


async def test_resolve(runner: SandboxRunner, base: str, context: Context) -> None:
    made = await runner.copy(copy(base, local(context, "f"), "/x"))
    one, two = await runner.resolve("base", ""), await runner.resolve(made, "")
    assert one.layers == [base] and two.layers == [base, made] and one.digest != two.digest
    with pytest.raises(UnknownLayer, match="needs its host"):
        await runner.resolve("python:3.12", "")

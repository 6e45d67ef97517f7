"""Layouts and archives that are damaged or hostile."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.layers.oci.conftest import TARS, layer_of, new_image, tar_of

from dsec.core.errors import DSecError, InvalidArgument, LayerCorrupt, NotFound, PayloadTooLarge, Unsupported
from dsec.layers.oci import (
    ImageSource,
    NewImage,
    NewLayer,
    OciConfig,
    open_image,
    write_archive,
    write_layout,
)
from dsec.layers.oci.export import Written
from dsec.layers.oci.model import Descriptor, digest_of, format_config


@pytest.fixture
def layout(image: NewImage, tmp_path: Path) -> tuple[Path, Written]:
    path = tmp_path / "l"
    return path, write_layout(path, image)


def blob(layout: tuple[Path, Written], number: int = 0) -> Path:
    return layout[0] / "blobs/sha256" / layout[1].layers[number].hex


def read(source: str | Path, number: int = 0, **given: Any) -> bytes:
    with open_image(str(source), **given) as image, image.open_tar(number) as stream:
        return stream.read()


# Layouts


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-1], r"ends after \d+ bytes of \d+|damaged or cut short"),
        (lambda data: data + b"x", r"more than the \d+ bytes"),
        (lambda data: data[:-20] + b"?" * 20, "damaged|its content is"),
        (lambda data: gzip.compress(TARS[1])[: len(data)], "ends after|its content is"),
        (lambda data: b"", r"ends after 0 bytes"),
    ],
)
def test_altered_layers(layout: tuple[Path, Written], change: Callable[[bytes], bytes], says: str) -> None:
    path = blob(layout)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(LayerCorrupt, match=rf"l: layer 0 \(sha256:.*({says})"):
        read(layout[0])
    with open_image(str(layout[0])) as image, image.open_layer(0) as stream, pytest.raises(LayerCorrupt):
        stream.read()


def test_a_layer_that_is_another_when_unpacked(image: NewImage, tmp_path: Path) -> None:
    """The blob is what it says; the configuration knows another one."""
    packed = gzip.compress(TARS[0])
    descriptor = Descriptor("application/vnd.oci.image.layer.v1.tar+gzip", digest_of(packed), len(packed))
    lie = NewLayer(lambda: io.BytesIO(TARS[0]), descriptor, lambda: io.BytesIO(packed), digest_of(b"another"))
    write_layout(tmp_path / "l", NewImage(OciConfig(), [lie]))
    with pytest.raises(LayerCorrupt, match=r"layer 0 .*, unpacked: its content is"):
        read(tmp_path / "l")


@pytest.mark.parametrize("kind", ["link", "directory", "fifo", "gone", "link above"])
def test_blobs_that_are_no_files(layout: tuple[Path, Written], kind: str, tmp_path: Path) -> None:
    path = blob(layout)
    data = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "outside").write_bytes(data)
        path.symlink_to(tmp_path / "outside")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link above":
        path.parent.rename(tmp_path / "moved")
        path.parent.symlink_to(tmp_path / "moved")
    with pytest.raises((InvalidArgument, NotFound), match=r"no regular file|is not there|symbolic|is a link"):
        read(layout[0])


def test_no_layout(tmp_path: Path, layout: tuple[Path, Written]) -> None:
    with pytest.raises(InvalidArgument, match="no OCI layout"):
        open_image(str(tmp_path))
    (layout[0] / "oci-layout").write_text('{"imageLayoutVersion":"2.0.0"}')
    with pytest.raises(Unsupported, match="version '2"):
        open_image(str(layout[0]))
    (layout[0] / "oci-layout").write_text(" " * 5000)
    with pytest.raises(PayloadTooLarge, match="more than 4096 bytes"):
        open_image(str(layout[0]))


def test_a_huge_index(layout: tuple[Path, Written]) -> None:
    with (layout[0] / "index.json").open("r+b") as f:
        f.truncate(1 << 40)
    with pytest.raises(PayloadTooLarge, match=r"index\.json: more than 4194304"):
        open_image(str(layout[0]))


def test_indexes_without_end(layout: tuple[Path, Written]) -> None:
    """They cannot lead to themselves, but they can be many."""
    kind = layout[1].manifest.media_type
    entry: dict[str, Any] = {"mediaType": kind, "digest": layout[1].manifest.digest, "size": 1}
    for _ in range(6):
        document = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
        name = digest_of(document)
        (layout[0] / "blobs/sha256" / name.removeprefix("sha256:")).write_bytes(document)
        entry = {
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "digest": name,
            "size": len(document),
        }
    (layout[0] / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    with pytest.raises(InvalidArgument, match="more than 4 indexes"):
        open_image(str(layout[0]))


def test_platforms_of_an_index(image: NewImage, tmp_path: Path) -> None:
    entries = []
    for number, architecture in enumerate(("amd64", "arm64")):
        config = OciConfig(os="linux", architecture=architecture)
        written = write_layout(tmp_path / "l", NewImage(config, [layer_of(TARS[number])]))
        entries.append(
            {
                "mediaType": written.manifest.media_type,
                "digest": written.manifest.digest,
                "size": written.manifest.size,
                "platform": {"os": "linux", "architecture": architecture},
            }
        )
    document = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    (tmp_path / "l/blobs/sha256" / digest_of(document)[7:]).write_bytes(document)
    head: dict[str, Any] = {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "digest": digest_of(document),
    }
    index = {"schemaVersion": 2, "manifests": [head | {"size": len(document)}]}
    (tmp_path / "l/index.json").write_text(json.dumps(index))
    assert read(tmp_path / "l", platform="linux/amd64") == TARS[0]
    assert read(tmp_path / "l", platform="linux/arm64") == TARS[1]
    with pytest.raises(NotFound, match=r"nothing for linux/s390x; there is linux/amd64, linux/arm64"):
        open_image(str(tmp_path / "l"), platform="linux/s390x")


def test_a_platform_that_one_image_has_not(layout: tuple[Path, Written]) -> None:
    with pytest.raises(NotFound, match="nothing for linux/s390x"):
        open_image(str(layout[0]), platform="linux/s390x")


def test_bombs(tmp_path: Path) -> None:
    write_layout(tmp_path / "l", new_image(tar_of({"zeros": bytes(20 << 20)})))
    with pytest.raises(PayloadTooLarge, match=r"layer 0 .*: more than 1048576 bytes come out"):
        read(tmp_path / "l", max_decompressed=1 << 20)
    assert len(read(tmp_path / "l", max_decompressed=30 << 20)) > 20 << 20


def test_layers_and_configuration_differ(tmp_path: Path) -> None:
    written = write_layout(tmp_path / "l", new_image(*TARS))
    config = format_config(OciConfig(diff_ids=written.diff_ids[:1]))
    with pytest.raises(InvalidArgument, match="2 layers, but 1 in its configuration"):
        open_docker(tmp_path, {"c.json": config, **{f"{n}/layer.tar": t for n, t in enumerate(TARS)}}, 2)


# Archives of docker save


def open_docker(tmp_path: Path, files: dict[str, bytes], layers: int, **entry: Any) -> ImageSource:
    document = [{"Config": "c.json", "Layers": [f"{n}/layer.tar" for n in range(layers)], **entry}]
    path = tmp_path / "d.tar"
    path.write_bytes(tar_of({**files, "manifest.json": json.dumps(document).encode()}))
    return open_image(f"docker-archive:{path}")


CONFIG = format_config(OciConfig(diff_ids=[digest_of(t) for t in TARS]))
FILES = {"c.json": CONFIG, "0/layer.tar": TARS[0], "1/layer.tar": TARS[1]}


def test_by_hand(tmp_path: Path) -> None:
    with open_docker(tmp_path, FILES, 2) as image, image.open_tar(1) as stream:
        assert stream.read() == TARS[1]
    with open_docker(tmp_path, FILES | {"1/layer.tar": gzip.compress(TARS[1])}, 2) as image:
        assert image.layers[1].media_type.endswith("gzip")
        with image.open_tar(1) as stream:
            assert stream.read() == TARS[1]


def test_another_layer_in_it(tmp_path: Path) -> None:
    with open_docker(tmp_path, FILES | {"1/layer.tar": TARS[0]}, 2) as image, image.open_tar(1) as stream:  # noqa: SIM117
        with pytest.raises(LayerCorrupt, match="layer 1"):
            stream.read()


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../../etc/passwd", "a/../../etc/passwd", "", "x\0y", "a" * 5000]
)
def test_paths_that_lead_outside(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="leads outside"):
        open_docker(tmp_path, FILES, 2, Config=name)
    with pytest.raises(InvalidArgument, match="leads outside"):
        open_docker(tmp_path, FILES, 2, Layers=["0/layer.tar", name])


def link(tmp_path: Path, target: str, kind: bytes = tarfile.SYMTYPE) -> str:
    path = tmp_path / "d.tar"
    document = [{"Config": "c.json", "Layers": ["0/layer.tar", "1/layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        for name, data in {**FILES, "manifest.json": json.dumps(document).encode()}.items():
            info = tarfile.TarInfo(name)
            if name == "1/layer.tar":
                info.type, info.linkname = kind, target
                tar.addfile(info)
            else:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return f"docker-archive:{path}"


def test_links(tmp_path: Path) -> None:
    source = link(tmp_path, "../0/layer.tar")
    with open_image(source) as image, pytest.raises(LayerCorrupt), image.open_tar(1) as stream:
        stream.read()  # it is the first layer, which the configuration does not have there
    for target in ("/etc/passwd", "../../etc/passwd"):
        with pytest.raises(InvalidArgument, match="leads outside"):
            open_image(link(tmp_path, target))
    with pytest.raises(InvalidArgument, match="a link without end"):
        open_image(link(tmp_path, "layer.tar"))
    with pytest.raises(NotFound, match=r"1/layer\.tar is not in the archive"):
        open_image(link(tmp_path, "nothing"))


def test_other_kinds(tmp_path: Path) -> None:
    for kind in (tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
        with pytest.raises(NotFound, match="is not in the archive"):
            open_image(link(tmp_path, "", kind))


@pytest.mark.parametrize("document", [b"", b"{}", b"[1]", b"[]", b"[{}]", b'[{"Config":1}]', b"[" * 100_000])
def test_no_manifest(tmp_path: Path, document: bytes) -> None:
    (tmp_path / "d.tar").write_bytes(tar_of({**FILES, "manifest.json": document}))
    with pytest.raises(InvalidArgument, match="docker-archive:"):
        open_image(f"docker-archive:{tmp_path}/d.tar")


def test_other_archives(tmp_path: Path) -> None:
    (tmp_path / "d.tar").write_bytes(tar_of({"repositories": b"{}"}))
    with pytest.raises(Unsupported, match="Docker before 1.10".replace(".", r"\.")):
        open_image(f"docker-archive:{tmp_path}/d.tar")
    (tmp_path / "d.tar").write_bytes(TARS[0])
    with pytest.raises(InvalidArgument, match="no image: neither"):
        open_image(f"{tmp_path}/d.tar")
    with pytest.raises(InvalidArgument, match="no archive of"):
        open_image(f"docker-archive:{tmp_path}/d.tar")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidArgument, match="no regular file"):
        open_image(f"{tmp_path}/fifo")
    with pytest.raises(InvalidArgument, match="is a directory"):
        open_image(f"oci-archive:{tmp_path}")


def test_damaged_archives(image: NewImage, tmp_path: Path) -> None:
    """Cut or altered anywhere: never another error than a typed one, and never other content."""
    path = tmp_path / "a.tar"
    write_archive(path, image)
    whole = path.read_bytes()
    for at in [*range(0, 4000, 97), *range(len(whole) - 12_000, len(whole), 331)]:
        for data in (whole[:at], whole[:at] + b"\xff" + whole[at + 1 :]):
            path.write_bytes(data)
            for scheme in ("oci-archive", "docker-archive"):
                try:
                    assert read(f"{scheme}:{path}") == TARS[0]
                except DSecError:
                    continue


@pytest.mark.parametrize("size", [1 << 21, 1 << 40])
def test_a_huge_header(tmp_path: Path, size: int) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, size
    (tmp_path / "d.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))
    with pytest.raises(InvalidArgument, match="no tar archive, or a damaged one"):
        open_image(f"{tmp_path}/d.tar")


def test_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.layers.oci.archive.MAX_MEMBERS", 3)
    (tmp_path / "d.tar").write_bytes(tar_of({str(n): b"" for n in range(4)}))
    with pytest.raises(PayloadTooLarge, match="more than 3 members"):
        open_image(f"{tmp_path}/d.tar")


def test_a_bomb_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.layers.oci.archive.MAX_ARCHIVE", 1 << 20)
    (tmp_path / "d").write_bytes(gzip.compress(tar_of({"x": bytes(4 << 20)})))
    with pytest.raises(PayloadTooLarge, match="more than 1048576 bytes come out"):
        open_image(f"{tmp_path}/d")


@pytest.mark.parametrize(
    "data", [b"", b"x", bytes(1024), gzip.compress(b"x" * 5000), b"\x1f\x8b", b"\x28\xb5\x2f\xfd"]
)
def test_what_is_no_archive(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "d").write_bytes(data)
    with pytest.raises((InvalidArgument, LayerCorrupt), match=r"/d: "):
        open_image(f"{tmp_path}/d")


# Writing


def test_a_layer_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        raise LayerCorrupt("the source is broken")

    for write in (write_layout, write_archive):
        with pytest.raises(LayerCorrupt, match="the source is broken"):
            write(tmp_path / "out", NewImage(OciConfig(), [NewLayer(broken)]))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("tag", ["", "a b", "-a", "a" * 129, "../x"])
def test_bad_tags(tmp_path: Path, tag: str) -> None:
    with pytest.raises(InvalidArgument, match="tag"):
        write_layout(tmp_path / "l", new_image(), tag=tag)


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=r"writing an image to .*Not a directory"):
        write_archive(tmp_path / "file/a.tar", new_image())
    with pytest.raises(InvalidArgument, match="level 10"):
        write_archive(tmp_path / "a.tar", new_image(), level=10)


def test_writing_again_mends(layout: tuple[Path, Written], image: NewImage) -> None:
    whole = blob(layout).read_bytes()
    blob(layout).write_bytes(bytes(len(whole)))
    write_layout(layout[0], image)
    assert blob(layout).read_bytes() == whole


def test_names_cannot_speak_to_a_terminal(layout: tuple[Path, Written]) -> None:
    index = json.loads((layout[0] / "index.json").read_bytes())
    index["manifests"][0]["annotations"] = {"org.opencontainers.image.ref.name": "\x1b[2Jx"}
    (layout[0] / "index.json").write_text(json.dumps(index))
    with pytest.raises(NotFound, match=r"there is \?\[2Jx"):
        open_image(f"oci:{layout[0]}:other")

"""Layout to registry to archive and back, with other people's tools as witnesses."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.layers.oci.conftest import PASSWORD, QUICK, TARS, USER, Served, layer_of, new_image

from dsec.core.errors import InvalidArgument, NotFound, ProtocolError, Unauthenticated
from dsec.layers.oci import (
    Credentials,
    ImageSource,
    NewImage,
    OciConfig,
    Reference,
    Registry,
    of_image,
    open_image,
    push,
    write_archive,
    write_layout,
)
from dsec.layers.oci.model import OCI_INDEX, Index, PlatformSpec

ALICE = Credentials(username=USER, password=PASSWORD)


def skopeo(*arguments: object) -> bytes:
    done = subprocess.run(
        ["skopeo", "--insecure-policy", *map(str, arguments)], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def contents(image: ImageSource, number: int) -> bytes:
    with image.open_tar(number) as stream:
        return stream.read()


def same(image: ImageSource) -> None:
    """Layers and configuration are what went in."""
    wanted = new_image(*TARS).config
    assert [contents(image, n) for n in range(len(image.layers))] == list(TARS)
    assert msgspec.structs.replace(image.config, diff_ids=[], architecture="", os="") == wanted


def test_layout(image: NewImage, tmp_path: Path) -> None:
    written = write_layout(tmp_path / "l", image, tag="v1")
    for name in (f"oci:{tmp_path}/l:v1", f"oci:{tmp_path}/l", f"{tmp_path}/l"):
        with open_image(name) as found:
            same(found)
            assert found.manifest_digest == written.manifest.digest
            with found.open_layer(1) as stream:
                assert gzip.decompress(stream.read()) == TARS[1]
    assert not list((tmp_path / "l").rglob(".new*"))


def test_a_layout_holds_several_images(image: NewImage, tmp_path: Path) -> None:
    write_layout(tmp_path / "l", image, tag="v1")
    write_layout(tmp_path / "l", new_image(TARS[0]), tag="v2")
    write_layout(tmp_path / "l", new_image(TARS[1]), tag="v2")
    with open_image(f"oci:{tmp_path}/l:v2") as found:
        assert found.open_tar(0).read() == TARS[1]
    with open_image(f"oci:{tmp_path}/l:v1") as found:
        same(found)
    with pytest.raises(InvalidArgument, match=r"2 images: name one.*v1, v2"):
        open_image(f"oci:{tmp_path}/l")
    with pytest.raises(NotFound, match=r"'v3'.*v1, v2"):
        open_image(f"oci:{tmp_path}/l:v3")


def test_equal_images_give_equal_bytes(image: NewImage, tmp_path: Path) -> None:
    write_archive(tmp_path / "a", image, name="x:1")
    write_archive(tmp_path / "b", new_image(*TARS), name="x:1")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("form", ["oci", "docker"])
@pytest.mark.parametrize("scheme", ["oci-archive:", "docker-archive:", ""])
def test_archive(image: NewImage, tmp_path: Path, form: Any, scheme: str) -> None:
    write_archive(tmp_path / "a.tar", image, form, name="some/name:tag")
    with open_image(f"{scheme}{tmp_path}/a.tar") as found:
        same(found)


@pytest.mark.parametrize("form", ["oci", "docker"])
def test_skopeo_reads_what_is_written(image: NewImage, tmp_path: Path, form: Any) -> None:
    path = tmp_path / "a.tar"
    write_archive(path, image, form, name="some/name:tag")
    for source in (f"oci-archive:{path}", f"docker-archive:{path}", f"docker-archive:{path}:some/name:tag"):
        seen = json.loads(skopeo("inspect", "--override-os=linux", source))
        assert seen["Labels"] == {"a": "b"} and "A=b=c" in seen["Env"] and len(seen["Layers"]) == 2
        copied = tmp_path / "copied"
        shutil.rmtree(copied, ignore_errors=True)
        skopeo("copy", source, f"oci:{copied}:x")
        with open_image(f"oci:{copied}:x") as found:
            assert [contents(found, n) for n in (0, 1)] == list(TARS)


@pytest.mark.parametrize("compressed", ["gzip", "zstd", "none"])
def test_an_archive_may_be_compressed_as_a_whole(image: NewImage, tmp_path: Path, compressed: str) -> None:
    import zstandard

    write_archive(tmp_path / "a.tar", image)
    data = (tmp_path / "a.tar").read_bytes()
    pack: Any = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress, "none": bytes}[
        compressed
    ]
    (tmp_path / "b").write_bytes(pack(data))
    with open_image(str(tmp_path / "b")) as found:
        same(found)


def test_archives_of_docker_and_skopeo(image: NewImage, tmp_path: Path) -> None:
    """skopeo writes the old form, with links from ID/layer.tar to the layers."""
    write_layout(tmp_path / "l", image)
    skopeo("copy", f"oci:{tmp_path}/l:latest", f"docker-archive:{tmp_path}/d.tar:n/m:t")
    for name in (
        f"docker-archive:{tmp_path}/d.tar",
        f"docker-archive:{tmp_path}/d.tar:n/m:t",
        f"{tmp_path}/d.tar",
    ):
        with open_image(name) as found:
            same(found)
    with pytest.raises(NotFound, match=r"docker\.io/n/m:t"):
        open_image(f"docker-archive:{tmp_path}/d.tar:other")
    skopeo("copy", f"oci:{tmp_path}/l:latest", f"oci-archive:{tmp_path}/o.tar:t")
    with open_image(f"oci-archive:{tmp_path}/o.tar:t") as found:
        same(found)


def test_umoci_unpacks_what_is_written(image: NewImage, tmp_path: Path) -> None:
    write_layout(tmp_path / "l", image, tag="v1")
    subprocess.run(
        ["umoci", "raw", "unpack", "--rootless", "--image", f"{tmp_path}/l:v1", tmp_path / "root"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert (tmp_path / "root/etc/two").read_bytes() == b"2"
    assert not (tmp_path / "root/etc/one").exists()


@pytest.mark.parametrize("chunk", [0, 100_000])
def test_registry(image: NewImage, registry: Served, tmp_path: Path, chunk: int) -> None:
    reference = Reference.parse(f"{registry.host}/a/b{chunk}:v1")
    with Registry(registry.host) as to:
        written = push(to, reference, image, chunk=chunk)
        assert push(to, reference, image).manifest == written.manifest
    with open_image(f"docker://{reference}") as found:
        same(found)
        assert found.manifest_digest == written.manifest.digest
    seen = json.loads(skopeo("inspect", "--tls-verify=false", f"docker://{reference}"))
    assert seen["Digest"] == written.manifest.digest
    with open_image(f"{registry.host}/a/b{chunk}@{written.manifest.digest}") as found:
        same(found)


def test_from_layout_to_registry_to_archive(image: NewImage, registry: Served, tmp_path: Path) -> None:
    write_layout(tmp_path / "l", image)
    reference = Reference.parse(f"{registry.host}/chain:v1")
    with open_image(f"{tmp_path}/l") as first, Registry(registry.host) as to:
        push(to, reference, of_image(first))
        with open_image(str(reference)) as second:
            assert second.raw_config == first.raw_config
            assert second.manifest_digest == first.manifest_digest
            write_archive(tmp_path / "a.tar", of_image(second), "docker", name="x:y")
    with open_image(f"docker-archive:{tmp_path}/a.tar") as third:
        same(third)
        assert third.raw_config == first.raw_config
    skopeo("inspect", f"docker-archive:{tmp_path}/a.tar")


def test_an_index_in_a_registry(registry: Served) -> None:
    name = f"{registry.host}/several"
    entries = []
    with Registry(registry.host) as to:
        for tar, (architecture, variant) in zip(TARS, (("arm", "v6"), ("s390x", "")), strict=True):
            config = OciConfig(os="linux", architecture=architecture, variant=variant)
            written = push(to, Reference.parse(f"{name}:{architecture}"), NewImage(config, [layer_of(tar)]))
            spec = PlatformSpec("linux", architecture, variant or None)
            entries.append(msgspec.structs.replace(written.manifest, platform=spec))
        index = msgspec.json.encode(Index(schema_version=2, media_type=OCI_INDEX, manifests=entries))
        to.put_manifest("several", "1", index, OCI_INDEX)
    for platform, number in (("linux/arm/v7", 0), ("linux/s390x", 1)):
        with open_image(f"{name}:1", platform=platform) as found:
            assert contents(found, 0) == TARS[number]
            assert found.manifest_digest == entries[number].digest
    with pytest.raises(NotFound, match=r"several:1: nothing for .*; there is linux/arm/v6, linux/s390x"):
        open_image(f"{name}:1", platform="linux/arm/v5")


def test_images_that_skopeo_pushes(image: NewImage, registry: Served, tmp_path: Path) -> None:
    write_layout(tmp_path / "l", image)
    for form, extra in (("v2s2", ()), ("oci", ("--dest-compress-format=zstd", "--dest-compress"))):
        name = f"{registry.host}/skopeo/{form}:1"
        skopeo(
            "copy",
            "--dest-tls-verify=false",
            f"--format={form}",
            *extra,
            f"oci:{tmp_path}/l:latest",
            f"docker://{name}",
        )
        with open_image(name) as found:
            same(found)


def test_a_layer_is_taken_from_another_repository(image: NewImage, registry: Served) -> None:
    with Registry(registry.host) as to:
        written = push(to, Reference.parse(f"{registry.host}/mount/one:1"), image)
        layer = written.layers[0]

        def never() -> Any:
            raise AssertionError("sent again")

        assert not to.has_blob("mount/two", layer.digest)
        assert to.push_blob("mount/two", layer, never, mount_from="mount/one") is False
        assert to.has_blob("mount/two", layer.digest)


def test_tls_and_basic(image: NewImage, locked_registry: Served) -> None:
    host, ca = locked_registry.host, locked_registry.ca
    reference = Reference.parse(f"{host}/secret:v1")
    with Registry(host, credentials=ALICE, ca=ca) as to:
        push(to, reference, image)
    with open_image(str(reference), auth=ALICE, ca=ca) as found:
        same(found)
    with open_image(str(reference), auth=ALICE, verify=False) as found:
        same(found)
    with pytest.raises(ProtocolError, match="certificate"):
        open_image(str(reference), auth=ALICE, patience=QUICK)
    with pytest.raises(Unauthenticated, match=rf"{reference}.*docker login"):
        open_image(str(reference), ca=ca, patience=QUICK)
    bad = Credentials(username=USER, password="wrong")
    with pytest.raises(Unauthenticated, match=r"answers 401"):
        open_image(str(reference), auth=bad, ca=ca, patience=QUICK)


def test_threads_side_by_side(registry: Served) -> None:
    tars = [TARS[0] + bytes(512 * n) for n in range(1, 7)]
    reference = Reference.parse(f"{registry.host}/many:1")
    with Registry(registry.host) as to:
        push(to, reference, NewImage(OciConfig(), [layer_of(t) for t in tars]))
    with open_image(str(reference)) as found, ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda n: found.open_tar(n).read(), range(6))) == tars


def test_what_is_not_there(registry: Served, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nobody.*404"):
        open_image(f"{registry.host}/nobody/here:1")
    for name in (f"{tmp_path}/none", f"oci:{tmp_path}/none", f"docker-archive:{tmp_path}/none:x"):
        with pytest.raises(NotFound, match="no such file"):
            open_image(name)

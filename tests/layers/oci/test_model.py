"""Manifests and configurations from outside."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsec.core.errors import InvalidArgument, PayloadTooLarge, Unsupported
from dsec.layers.oci import OciConfig
from dsec.layers.oci.model import (
    DOCKER_MANIFEST,
    MAX_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER,
    OCI_MANIFEST,
    Index,
    Manifest,
    format_config,
    parse_config,
    parse_manifest,
)

D = "sha256:" + "a" * 64
LAYER = {"mediaType": OCI_LAYER, "digest": D, "size": 1}
CONFIG = {"mediaType": OCI_CONFIG, "digest": D, "size": 1}


def manifest(**changed: Any) -> bytes:
    whole = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": CONFIG, "layers": [LAYER], **changed}
    return json.dumps({k: v for k, v in whole.items() if v is not ...}).encode()


def test_what_is_good() -> None:
    assert isinstance(parse_manifest(manifest(), "", "x"), Manifest)
    assert isinstance(parse_manifest(manifest(mediaType=...), DOCKER_MANIFEST, "x"), Manifest)
    assert isinstance(
        parse_manifest(manifest(mediaType=..., annotations=None, subject={}), "", "x"), Manifest
    )
    index = manifest(mediaType=OCI_INDEX, config=..., layers=..., manifests=[LAYER])
    assert isinstance(parse_manifest(index, "", "x"), Index)


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (b"", InvalidArgument, "not as it should be"),
        (b"null", InvalidArgument, "not as it should be"),
        (b"[" * 100_000, InvalidArgument, "not as it should be"),
        (b'{"schemaVersion":2,"x":' + b"[" * 100_000, InvalidArgument, "not as it should be"),
        (b'{"schemaVersion":"2"}', InvalidArgument, "schemaVersion"),
        (b"\xff\xfe", InvalidArgument, "not as it should be"),
        (b" " * (MAX_MANIFEST + 1), PayloadTooLarge, "more than 4194304 bytes"),
        (b'{"schemaVersion":1,"fsLayers":[]}', Unsupported, "schema 1"),
        (b'{"schemaVersion":2}', Unsupported, "no manifest of a container image"),
        (manifest(manifests=[LAYER]), InvalidArgument, "an index as well"),
        (manifest(mediaType="application/x"), Unsupported, "application/x"),
        (manifest(mediaType=OCI_INDEX), Unsupported, "no manifest"),
        (manifest(layers=[LAYER] * 513), PayloadTooLarge, "513 layers, more than 512"),
        (manifest(config={**CONFIG, "mediaType": "application/vnd.cncf.helm"}), Unsupported, "helm"),
        (manifest(config={**CONFIG, "size": 9 << 20}), PayloadTooLarge, "configuration: a size"),
        (manifest(config={**CONFIG, "digest": "sha512:" + "a" * 128}), InvalidArgument, "sha512"),
        (manifest(layers=[{**LAYER, "digest": "../../etc/passwd"}]), InvalidArgument, "only sha256"),
        (manifest(layers=[{**LAYER, "digest": D + "\n"}]), InvalidArgument, "only sha256"),
        (manifest(layers=[{**LAYER, "size": -1}]), PayloadTooLarge, "a size of -1"),
        (manifest(layers=[{**LAYER, "size": 1 << 62}]), PayloadTooLarge, "a size of"),
        (manifest(layers=[{**LAYER, "size": 1.5}]), InvalidArgument, "int"),
        (manifest(layers=[{**LAYER, "urls": ["http://169.254.169.254/"]}]), Unsupported, "foreign layer"),
        (
            manifest(layers=[{**LAYER, "mediaType": OCI_LAYER.replace("layer", "layer.nondistributable")}]),
            Unsupported,
            "layer 0: a foreign layer",
        ),
        (manifest(layers=[{**LAYER, "mediaType": OCI_LAYER + "+encrypted"}]), Unsupported, "only tar"),
    ],
)
def test_what_is_refused(data: bytes, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=rf"^image x.*{says}"):
        parse_manifest(data, "", "image x")


def test_a_configuration_comes_back() -> None:
    config = OciConfig(
        env=["A=b"], user="u", labels={"a": "b"}, architecture="arm64", os="linux", variant="v8", diff_ids=[D]
    )
    assert parse_config(format_config(config), "x") == config


def test_nulls_of_go() -> None:
    data = (
        b'{"config":{"Env":null,"Cmd":null,"Labels":null,"User":"","Volumes":null,"OnBuild":null},'
        b'"rootfs":{"type":"layers","diff_ids":null},"history":null,"container_config":{}}'
    )
    assert parse_config(data, "x") == OciConfig()


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b'{"rootfs":{"diff_ids":["x"]}}',
        b'{"rootfs":{"diff_ids":[1]}}',
        b'{"rootfs":{},"config":{"Env":"A=b"}}',
        b'{"rootfs":{},"config":{"Env":[1]}}',
        b'{"rootfs":{},"config":[]}',
    ],
)
def test_bad_configurations(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="image x: configuration"):
        parse_config(data, "image x")

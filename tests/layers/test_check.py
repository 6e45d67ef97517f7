"""What is found in a layer before it is published."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dsec.layers import secrets
from dsec.layers.check import CAPABILITY, Finding, Limits, check
from dsec.layers.erofs.format import BLOCK
from dsec.layers.erofs.tree import HOLE, OPAQUE, Directory, Extent, File, Inode, Special, Symlink, Tree

F, D, L = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK | 0o777
B64 = b"MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"


def file(data: bytes = b"", mode: int = 0o644, **more: Any) -> File:
    return File(F | mode, size=len(data), tail=data, **more)


def link(target: str) -> Symlink:
    return Symlink(L, target=target.encode())


def whiteout() -> Special:
    return Special(stat.S_IFCHR)


def tree(**paths: Inode) -> Tree:
    made = Tree()
    for path, inode in paths.items():
        made.put(path.encode(), inode)
    return made


def look(made: Tree, below: Tree | None = None, **how: Any) -> list[Finding]:
    def read(inode: File) -> Iterator[bytes]:
        data = made.read_tail(inode.tail)
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    return check(made, read=read, below=(below or Tree()).lookup, **how)


def kinds(found: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.kind, f.severity, f.path) for f in found]


def test_nothing_to_find() -> None:
    made = tree(
        **{
            "usr/bin/x": file(b"\x7fELF", 0o755),
            "tmp": Directory(D | 0o1777),
            "gone": whiteout(),
            "l": link("usr"),
        }
    )
    made.put(b"run/fifo", Special(stat.S_IFIFO | 0o644))
    assert look(made) == []


def test_size_counts_what_is_stored_once() -> None:
    sparse = File(F | 0o644, size=10 << 40, extents=(Extent(HOLE, 0, 1 << 20), Extent(0, 0, 10)))
    made = tree(a=sparse, b=sparse, c=file(b"x" * 100))
    size = 10 * BLOCK + 100
    assert look(made, limits=Limits(max_bytes=size)) == []
    (found,) = look(made, limits=Limits(max_bytes=size - 1))
    assert (found.kind, found.severity, found.path) == ("size", "refuse", "") and str(size) in found.message


def test_number_of_files() -> None:
    made = tree(a=file(), b=link("a"), c=whiteout(), **{"d/e": file()})
    assert look(made, limits=Limits(max_files=4)) == []
    assert kinds(look(made, limits=Limits(max_files=3))) == [("files", "refuse", "")]


def test_privileges() -> None:
    made = tree(
        su=file(mode=0o4755),
        wall=file(mode=0o2755),
        ping=file(mode=0o755, xattrs={CAPABILITY: b"\1"}),
        shared=Directory(D | 0o2755),
    )
    assert kinds(look(made)) == [
        ("capabilities", "warning", "ping"),
        ("setuid", "warning", "su"),
        ("setuid", "warning", "wall"),
    ]
    assert "setgid" in look(made)[2].message


def test_world_writable_and_devices() -> None:
    made = tree(
        **{"open": Directory(D | 0o777), "open/file": file(mode=0o666), "tmp": Directory(D | 0o1777)},
        disk=Special(stat.S_IFBLK | 0o660, rdev=5),
        null=Special(stat.S_IFCHR | 0o666, rdev=259),
    )
    assert kinds(look(made)) == [
        ("device", "warning", "disk"),
        ("device", "warning", "null"),
        ("writable", "warning", "open"),
        ("writable", "warning", "open/file"),
    ]


def pem(kind: bytes, newline: bytes = b"\n") -> bytes:
    return b"-----BEGIN " + kind + b"PRIVATE KEY-----" + newline + B64 + newline + b"-----END"


# Put together here, so that no scanner takes this file for a leak.
SECRETS = {
    "rsa": pem(b"RSA "),
    "plain": pem(b""),
    "openssh": b"text before\n" + pem(b"OPENSSH ", b"\r\n"),
    "encrypted": b"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES,00\n\n" + B64,
    "service.json": b'{"private_key": "' + pem(b"", b"\\n") + b'"}',
    "pgp": b"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n" + B64,
    "aws": b"key = AK" + b"IAQ3EGTUXYZ2345ABC\n",
    "github": b"gh" + b"p_" + b"a1B2" * 9,
    "github_fine": b"github" + b"_pat_" + b"A" * 22 + b"_" + b"b" * 59,
    "gitlab": b"gl" + b"pat-" + b"x" * 20,
    "slack": b"xo" + b"xb-123456789012-123456789012-abcdefABCDEF",
    "hook": b"https://hooks.slack" + b".com/services/T01234567/B01234567/" + b"a" * 24,
    "google": b"AI" + b"za" + b"Sy" + b"a" * 33,
    "npm": b"np" + b"m_" + b"a" * 36,
    "root/.netrc": b"machine x login y password z",
    "root/.docker/config.json": b'{"auths": {"r": {"auth": "dTpw"}}}',
    "root/.git-credentials": b"https://user:pw@host",
    "root/.aws/credentials": b"[default]\naws_secret_access_key = abc",
    "root/.npmrc": b"//registry/:_authToken=abc",
    "root/.pypirc": b"[pypi]\npassword = x",
    "root/.pgpass": b"host:5432:db:user:pw",
}


@pytest.mark.parametrize("path", SECRETS)
def test_secrets(path: str) -> None:
    data = SECRETS[path]
    (found,) = look(tree(**{path: file(data)}))
    assert (found.kind, found.severity, found.path) == ("secret", "refuse", path)
    assert not any(word in found.message for word in data.decode().split() if len(word) > 12)


HARMLESS = {
    "libcrypto.so": b"\0-----BEGIN PRIVATE KEY-----\0-----BEGIN RSA PRIVATE KEY-----\n\0-----END",
    "doc": b"AK" + b"IAIOSFODNN7EXAMPLE",
    "cert.pem": b"-----BEGIN CERTIFICATE-----\n" + B64,
    "public": b"-----BEGIN PUBLIC KEY-----\n" + B64,
    "base64": b"xAK" + b"IAQ3EGTUXYZ2345ABC",
    "root/.docker/config.json": b'{"auths": {"r": {}}, "credsStore": "desktop"}',
    "root/.npmrc": b"//registry/:_authToken=${TOKEN}",
    "root/netrc": b"password x",
    "root/.ssh/id_rsa.pub": b"ssh-rsa AAAA",
    "root/.ssh/id_rsa": b"",
    "root/.pgpass": b"# host:port:db:user:pw\n",
}


@pytest.mark.parametrize("path", HARMLESS)
def test_no_secrets(path: str) -> None:
    assert look(tree(**{path: file(HARMLESS[path])})) == []


def test_a_name_alone_is_a_warning() -> None:
    made = tree(**{"root/.ssh/id_ed25519": file(b"what is it")})
    assert kinds(look(made)) == [("secret", "warning", "root/.ssh/id_ed25519")]


def test_an_allowed_secret_is_a_note() -> None:
    made = tree(**{"test/key.pem": file(pem(b"")), "key.pem": file(pem(b""))})
    found = look(made, allow=lambda path: path.startswith(b"test/"))
    assert kinds(found) == [("secret", "refuse", "key.pem"), ("secret", "note", "test/key.pem")]


def test_where_secrets_are_looked_for() -> None:
    late = b"x" * 5000 + pem(b"")
    limits = Limits(scan_below=6000, scan_first=5000)
    assert look(tree(a=file(late)), limits=limits) == []
    assert len(look(tree(a=file(late)))) == 1
    assert look(tree(a=file(pem(b"") + b"x" * 6000)), limits=limits) == []


def test_a_file_is_read_no_further_than_it_is_searched() -> None:
    taken = 0

    def read(_: File) -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 1000

    check(tree(a=file(b"x")), read=read, below=Tree().lookup, limits=Limits(scan_first=10_000))
    assert taken == 10


HOSTILE = [
    b"\n" * (1 << 20),
    b" " * (1 << 20),
    b"://" + b":" * (1 << 20),
    b"://a" * (1 << 18),
    b":" * (1 << 20),
    b"a:" * (1 << 19),
    b"password " * (1 << 17),
    b'"auth" ' * (1 << 17),
    b"_auth" + b" " * (1 << 20),
    b"-----BEGIN PRIVATE KEY-----\n" * (1 << 15),
    b"-----BEGIN PRIVATE KEY-----\n" + b"A-: " * (1 << 18),
    b"AKIA" * (1 << 18),
    b"xoxb-1" * (1 << 17),
    b"github_pat_" * (1 << 16),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_no_content_takes_for_ever(number: int) -> None:
    names = (
        ".netrc",
        ".docker/config.json",
        ".git-credentials",
        ".aws/credentials",
        ".npmrc",
        ".pypirc",
        ".pgpass",
    )
    began = time.process_time()
    for name in names:
        list(secrets.search(name.encode(), HOSTILE[number]))
    assert time.process_time() - began < 5


def test_many_names_of_one_file_are_searched_once() -> None:
    one = file(pem(b""))
    assert len(look(tree(a=one, b=one, c=one))) == 1


LINKS = [
    ("bin/sh", "dash", False),
    ("bin/sh", "/bin/dash", False),
    ("x", "/lib/libc.so", False),  # lib is a link of the layer below
    ("a/b/c", "../../bin/dash", False),
    ("a/b/c", "../../../../../bin/dash", False),
    ("x", "/proc/self/fd", False),
    ("x", "/dev/null", False),
    ("x", "run/lock", False),
    ("x", ".", False),
    ("x", "nowhere", True),
    ("x", "/etc/removed", True),
    ("x", "/hidden/old", True),
    ("x", "/hidden/new", False),
    ("x", "/bin/dash/more", True),
    ("x", "x", True),
    ("x", "/gone/file", True),
]


@pytest.mark.parametrize(("path", "target", "dangles"), LINKS)
def test_symbolic_links(path: str, target: str, dangles: bool) -> None:
    below = tree(
        **{"bin/dash": file(b"x"), "usr/lib/libc.so": file(b"x"), "lib": link("usr/lib")},
        **{"etc/removed": file(b"x"), "hidden/old": file(b"x"), "gone/file": file(b"x")},
    )
    made = tree(
        **{
            "etc/removed": whiteout(),
            "hidden": Directory(D | 0o755, xattrs={OPAQUE: b"y"}),
            "hidden/new": file(b"x"),
            "gone": whiteout(),
            path: link(target),
        }
    )
    assert kinds(look(made, below)) == ([("dangling", "note", path)] if dangles else [])


def test_a_ring_of_links() -> None:
    assert len(look(tree(a=link("b"), b=link("c/x"), c=link("a")))) == 3


def test_no_flood() -> None:
    made = Tree()
    for number in range(50):
        made.put(b"%d\xff" % number, file(mode=0o666))
    found = look(made, limits=Limits(max_findings=10))
    assert len(found) == 11 and found[-1].kind == "more" and "40 more" in found[-1].message
    assert found[0].path == "0\\xff"


def test_deep() -> None:
    made = Tree()
    made.put(b"/".join([b"d"] * 5000) + b"/x", file(mode=0o666))
    assert len(look(made)) == 1

"""ClientHellos of real clients in any pieces, and bytes of people who mean ill."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.network.gateway.client_hello import MAX_HELLO, HelloRefused, server_name


def from_ssl(name: str | None = "www.example.org") -> bytes:
    """What Python's ssl says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def from_program(*arguments: str) -> bytes:
    """What a program says first to a server that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        found = bytearray()

        def hear() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(20)
                while len(found) < 5 or len(found) < 5 + int.from_bytes(found[3:5], "big"):
                    if not (part := sock.recv(65536)):
                        return
                    found.extend(part)

        thread = threading.Thread(target=hear)
        thread.start()
        port = str(listener.getsockname()[1])
        command = [a.replace("PORT", port) for a in arguments]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
        thread.join(20)
        return bytes(found)


HELLO = from_ssl()
OPENSSL = ("openssl", "s_client", "-connect", "127.0.0.1:PORT", "-servername", "WWW.example.org")
LARGE = ["-groups", "ffdhe8192:ffdhe6144", "-tls1_3"]
CURL = ("curl", "-sk", "--connect-to", "www.example.org:443:127.0.0.1:PORT", "https://www.example.org/")


@pytest.mark.parametrize(
    "command",
    [OPENSSL, (*OPENSSL, *LARGE), (*OPENSSL, "-tls1_2"), CURL],
    ids=["openssl", "large", "1.2", "curl"],
)
def test_clients_of_others(command: tuple[str, ...]) -> None:
    hello = from_program(*command)
    assert server_name(hello) == "www.example.org"
    assert all(server_name(hello[:n]) is None for n in range(len(hello)))


def test_byte_by_byte() -> None:
    assert [server_name(HELLO[:n]) for n in range(len(HELLO))] == [None] * len(HELLO)
    assert server_name(HELLO) == "www.example.org"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_over_several_records(size: int) -> None:
    body = HELLO[5:]
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    data = b"".join(b"\x16\x03\x01" + len(p).to_bytes(2, "big") + p for p in parts)
    assert server_name(data) == "www.example.org"
    assert all(server_name(data[:n]) is None for n in range(len(data)))


def _hello(*extensions: tuple[int, bytes]) -> bytes:
    listed = b"".join(k.to_bytes(2, "big") + len(b).to_bytes(2, "big") + b for k, b in extensions)
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0"
    body += len(listed).to_bytes(2, "big") + listed
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


def _name(host: bytes, kind: int = 0) -> tuple[int, bytes]:
    entry = bytes([kind]) + len(host).to_bytes(2, "big") + host
    return 0, len(entry).to_bytes(2, "big") + entry


TWO = b"\0\0\x01a\0\0\x01b"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_hello(), "no_name"),
        (_hello(_name(b"")), "no_name"),
        (_hello(_name(b"192.0.2.1")), "no_name"),
        (_hello(_name(b"2001:db8::1")), "no_name"),
        (_hello(_name(b"a\0.example.org")), "no_name"),
        (_hello(_name(b"a" * 64 + b".example.org")), "no_name"),
        (_hello(_name("ü.example.org".encode())), "no_name"),
        (_hello(_name(b"a.org", kind=1)), "malformed"),
        (_hello(_name(b"a.org"), _name(b"b.org")), "malformed"),
        (_hello((0, len(TWO).to_bytes(2, "big") + TWO)), "malformed"),
        (_hello(_name(b"a.org"), (0xFE0D, b"\0")), "encrypted_hello"),
        (_hello(_name(b"a.org"), (0xFFCE, b"\0")), "encrypted_hello"),
        (b"GET / HTTP/1.1\r\n\r\n", "not_tls"),
        (b"SSH-2.0-x\r\n", "not_tls"),
        (b"\x80\x2e\x01\x03\x01", "not_tls"),
        (b"\x16\x03\x01\0\x04\x02\0\0\0", "not_tls"),
        (b"\x16\x03\x01\0\0", "not_tls"),
        (b"\x16\x03\x01\0\x04\x01\x00\xff\xff", "too_long"),
    ],
)
def test_refused(data: bytes, reason: str) -> None:
    with pytest.raises(HelloRefused, match=f"^{reason}$"):
        server_name(data)


def test_no_name_from_a_real_client() -> None:
    with pytest.raises(HelloRefused, match="no_name"):
        server_name(from_ssl(None))


def test_a_hello_without_end_is_refused() -> None:
    """Records that say nothing cannot keep it waiting."""
    endless = b"\x16\x03\x01\0\x04\x01\0\x40\0" + b"\x16\x03\x01\0\x01a" * MAX_HELLO
    with pytest.raises(HelloRefused):
        server_name(endless[: 3 * MAX_HELLO])


@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    try:
        name = server_name(data)
    except HelloRefused:
        return
    assert name is None or name.isascii()


@given(st.lists(st.tuples(st.integers(0, len(HELLO) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_mutations(changes: list[tuple[int, int]]) -> None:
    """Nothing but a refusal is raised, and a name that is found is one of DNS."""
    data = bytearray(HELLO)
    for at, value in changes:
        data[at] = value
    try:
        name = server_name(bytes(data))
    except HelloRefused:
        return
    assert name is None or all(0 < len(label) <= 63 for label in name.split("."))

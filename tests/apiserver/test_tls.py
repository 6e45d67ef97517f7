"""HTTPS by configuration, certificates of clients, limits on rates and connections."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from tests.apiserver.stack import StackServer, args

from dsec.apiserver.limits import ADDRESSES, ApiLimits, Rates
from dsec.apiserver.server import Tls
from dsec.core.errors import InvalidArgument, TooManyRequests, Unavailable


def run(*argv: str, directory: Path) -> None:
    subprocess.run(argv, cwd=directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem signs server.pem (for 127.0.0.1) and client.pem; other.pem is signed by nobody."""
    d = tmp_path_factory.mktemp("pki")
    new = ("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ca", "other"):
        extensions = ("-addext", "keyUsage=critical,keyCertSign")
        run(*new, "-x509", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem",
            *(extensions if name == "ca" else ()), directory=d)  # fmt: skip
    (d / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        run(*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr", directory=d)
        run("openssl", "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-extfile", "san", "-out", f"{name}.pem", directory=d)  # fmt: skip
    return d


Serving = Callable[..., StackServer]


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    made: list[StackServer] = []

    def of(**how: object) -> StackServer:
        made.append(StackServer(tmp_path, **how))
        return made[-1]

    yield of
    for server in made:
        await server.stop()
        server.tokens.close()


def tls(pki: Path, **more: Path) -> Tls:
    return Tls(certificate=pki / "server.pem", key=pki / "server.key", **more)


async def test_all_of_it_over_tls(serving: Serving, pki: Path) -> None:
    server = serving(tls=tls(pki))
    await server.start()
    assert server.url.startswith("https://127.0.0.1:")
    async with server.client(ca=str(pki / "ca.pem")) as client:
        sandbox = await client.run_container(args())
        assert (await sandbox.exec(["echo", "well"])).stdout == b"well\n"
        seen: list[bytes] = []
        await sandbox.run_shell("echo streamed", on_stdout=seen.append)
        assert b"".join(seen) == b"streamed\n"
        data = bytes(3_000_000)
        await sandbox.files.write("/tmp/a", data)
        assert await sandbox.files.read("/tmp/a") == data
        await sandbox.stop()


async def test_a_server_that_nobody_vouches_for(serving: Serving, pki: Path) -> None:
    server = serving(tls=tls(pki))
    await server.start()
    async with server.client(ca=str(pki / "other.pem"), retries=0) as client:
        with pytest.raises(Unavailable, match="certificate"):
            await client.node()


async def test_clients_need_a_certificate(serving: Serving, pki: Path) -> None:
    server = serving(tls=tls(pki, client_ca=pki / "ca.pem"))
    await server.start()
    context = ssl.create_default_context(cafile=pki / "ca.pem")
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            async with session.get(server.url + "/healthz", ssl=context):
                pass
        context.load_cert_chain(pki / "client.pem", pki / "client.key")
        async with session.get(server.url + "/healthz", ssl=context) as answer:
            assert answer.status == 200


async def test_old_versions_and_plain_text_are_refused(serving: Serving, pki: Path) -> None:
    server = serving(tls=tls(pki))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(20):
        try:
            assert b"200" not in await reader.read()
        except ConnectionError:
            pass
    writer.close()
    argv = ("openssl", "s_client", "-connect", server.url.removeprefix("https://"), "-tls1_1")
    old = await asyncio.create_subprocess_exec(
        *argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    async with asyncio.timeout(20):
        await old.wait()
    assert old.returncode != 0


@pytest.mark.parametrize("broken", ["certificate", "key", "client_ca"])
def test_files_that_do_not_fit(pki: Path, tmp_path: Path, broken: str) -> None:
    files = {"certificate": pki / "server.pem", "key": pki / "server.key", "client_ca": pki / "ca.pem"}
    for bad in (tmp_path / "absent", pki / "san"):
        with pytest.raises(InvalidArgument, match="TLS with"):
            Tls(**{**files, broken: bad}).context()


async def test_a_token_has_its_rate(serving: Serving) -> None:
    server = serving(limits=ApiLimits(requests_per_second=5))
    await server.start()
    headers = {"Authorization": f"Bearer {server.token}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        said = [await _status(session, server.url + "/v1/sandboxes") for _ in range(60)]
    assert said[:20] == [200] * 20 and 429 in said


async def test_a_stranger_is_held_off(serving: Serving) -> None:
    server = serving(limits=ApiLimits(refusals_per_second=2))
    await server.start()
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer dsec_guess"}) as session:
        said = [await _status(session, server.url + "/v1/node") for _ in range(60)]
    assert said[:10] == [401] * 10 and said.count(429) > 30
    async with server.client() as client:
        await client.node()  # a good token from the same address is not held off


async def _status(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url) as answer:
        return answer.status


async def test_connections_are_bounded(serving: Serving) -> None:
    server = serving(limits=ApiLimits(max_connections=4))
    await server.start()
    port = int(server.url.rsplit(":", 1)[1])
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
    for reader, writer in held:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(20):
        try:
            assert await reader.read() == b""
        except ConnectionError:
            pass
    for _, open_ in [*held, (reader, writer)]:
        open_.close()


def test_strangers_are_forgotten_in_time() -> None:
    now = [0.0]
    rates = Rates(ApiLimits(refusals_per_second=1), lambda: now[0])
    for _ in range(5):
        rates.stranger("192.0.2.1")
    with pytest.raises(TooManyRequests):
        rates.stranger("192.0.2.1")
    now[0] = 1.0
    rates.stranger("192.0.2.1")
    for i in range(2 * ADDRESSES):
        rates.stranger(f"198.51.{i >> 8}.{i & 255}")
    assert len(rates._strangers) == ADDRESSES

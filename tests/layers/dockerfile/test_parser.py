"""The parser: Docker's grammar case by case, files of the common kinds, and any bytes at all."""

from __future__ import annotations

import random
import time

import pytest

from dsec.core.errors import InvalidArgument
from dsec.layers.dockerfile import ignore
from dsec.layers.dockerfile.faults import At
from dsec.layers.dockerfile.parser import Dockerfile, Parsed, parse
from dsec.layers.dockerfile.words import expand

AT = At("Dockerfile", 1, "ENV")


def one(text: str) -> Parsed:
    """The instruction after FROM."""
    (found,) = parse(b"FROM x\n" + text.encode()).stages[0].body
    return found


def said(text: str) -> list[str]:
    lines: list[str] = []
    parse(text.encode(), said=lines.append)
    return lines


@pytest.mark.parametrize(
    ("text", "name", "rest"),
    [
        ("RUN echo a \\\n  b", "RUN", "echo a   b"),
        ("run echo a \\\n# a comment\n  b", "RUN", "echo a   b"),
        ("RUN echo a \\\n\n \t\n  b", "RUN", "echo a   b"),
        ("RUN echo a \\  \n  b", "RUN", "echo a   b"),
        ("RUN echo a \\\n  # indented\n  b", "RUN", "echo a   b"),
        ("RUN \\\necho a", "RUN", "echo a"),
        ("   RUN echo # no comment", "RUN", "echo # no comment"),
        ("RUN echo a\\\\", "RUN", "echo a\\\\"),
        ("RUN echo a\r\n", "RUN", "echo a"),
        ("WORKDIR /a b", "WORKDIR", "/a b"),
        ("USER\tme", "USER", "me"),
    ],
)
def test_lines(text: str, name: str, rest: str) -> None:
    found = one(text)
    assert (found.name, found.text) == (name, rest)


def test_directives() -> None:
    text = "# syntax=docker/dockerfile:1\n# escape=`\nFROM x\nRUN a `\n b\\\nUSER c\n"
    parsed = parse(text.encode())
    assert parsed.escape == "`"
    assert [p.text for p in parsed.stages[0].body] == ["a  b\\", "c"]
    assert said(text) == ["Dockerfile:1: directive 'syntax' is ignored"]
    # After a comment or a blank line it is a comment.
    for before in ("# about\n", "\n", "FROM y\n"):
        assert parse((before + "# escape=`\nFROM x\nRUN a \\\n b\n").encode()).escape == "\\"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('RUN ["a", "b c"]', ("a", "b c")),
        ('CMD ["a"]', ("a",)),
        ('ENTRYPOINT [ "a" , "\\u0041" ]', ("a", "A")),
        ('COPY ["a b", "/c"]', ("a b", "/c")),
        ("COPY a b /c/", ("a", "b", "/c/")),
        ("RUN ['a', 'b']", ()),
        ('RUN [ "a" ] && b', ()),
        ("RUN [ -f x ]", ()),
        ('CMD ["a", 1]', ()),
        ('SHELL ["/bin/bash", "-c"]', ("/bin/bash", "-c")),
    ],
)
def test_json_form(text: str, words: tuple[str, ...]) -> None:
    assert one(text).words == words


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("ENV a=1", (("a", "1"),)),
        ("ENV a=1 b='x y' c=x\\ y", (("a", "1"), ("b", "'x y'"), ("c", "x\\ y"))),
        ("ENV a=1 \\\n    b=2", (("a", "1"), ("b", "2"))),
        ("ENV a some value with = sign", (("a", "some value with = sign"),)),
        ('LABEL "com.example.vendor"="ACME Inc" b=', (('"com.example.vendor"', '"ACME Inc"'), ("b", ""))),
        ("ARG a", (("a", None),)),
        ("ARG a=1 b", (("a", "1"), ("b", None))),
        ("ARG a=", (("a", ""),)),
    ],
)
def test_pairs(text: str, pairs: object) -> None:
    assert one(text).pairs == pairs


VALUES = {"x": "1", "e": "", "foo": "/bar", "a.b": "no"}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$x", "1"),
        ("${x}", "1"),
        ("a$x.b", "a1.b"),
        ("${x}_", "1_"),
        ("$x_", ""),
        ("${u}", ""),
        ("${u:-w}", "w"),
        ("${e:-w}", "w"),
        ("${e-w}", ""),
        ("${u-w}", "w"),
        ("${x:-w}", "1"),
        ("${x:+w}", "w"),
        ("${e:+w}", ""),
        ("${e+w}", "w"),
        ("${u+w}", ""),
        ("${u:-${x}}", "1"),
        ("${u:-$foo/z}", "/bar/z"),
        ("\\$x", "$x"),
        ("\\${x}", "${x}"),
        ("'$x'", "$x"),
        ('"$x"', "1"),
        ('"\\$x"', "$x"),
        ('"a\\"b"', 'a"b'),
        ('"a\\b"', "a\\b"),
        ("a\\ b", "a b"),
        ("'a b'c\"d e\"", "a bcd e"),
        ("a$", "a$"),
        ("$", "$"),
        ("a$/b", "a$/b"),
        ("${x:?none}", "1"),
        ("\\\\", "\\"),
        ("$foo/$x", "/bar/1"),
        ("$1", ""),
        ("é$x", "é1"),
    ],
)
def test_substitution(word: str, value: str) -> None:
    assert expand(word, VALUES, "\\", AT) == value


@pytest.mark.parametrize(
    "word", ["${x", "${", "${}", "'a", '"a', "${x:=1}", "${x%y}", "${u:?set it}", "${x:"]
)
def test_substitution_refused(word: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^Dockerfile:1: ENV: "):
        expand(word, VALUES, "\\", AT)
    with pytest.raises(InvalidArgument):
        expand("${u:-" * 1000 + "}" * 1000, {}, "\\", AT)


def test_heredocs() -> None:
    run = one("RUN <<EOF\necho a\n\n# kept\nEOF\n")
    assert [(h.name, h.body, h.raw) for h in run.heredocs] == [("EOF", "echo a\n\n# kept\n", False)]
    copy = one("COPY <<-'A' <<B /to/\n\tx\n\tA\ny $z\nB\n")
    assert [(h.name, h.body, h.raw) for h in copy.heredocs] == [("A", "x\n", True), ("B", "y $z\n", False)]
    assert one("RUN cat <<< here").heredocs == () and one("CMD <<EOF").heredocs == ()
    shift = one("RUN echo $((1<<2))")
    assert shift.heredocs == ()
    with pytest.raises(InvalidArgument, match="add a line 'EOF'"):
        one("RUN <<EOF\necho")


def test_flags() -> None:
    assert one("COPY --from=a --chown=1:2 --chmod=755 x /y").flags == {
        "from": "a",
        "chown": "1:2",
        "chmod": "755",
    }
    assert one("RUN --mount=type=cache,target=/c -- --x").text == "--x"
    assert said("FROM x\nRUN --mount=type=cache,target=/c y") == [
        "Dockerfile:2: RUN: --mount=type=cache is ignored: the command sees the layer's own directory"
    ]
    assert said("FROM x\nHEALTHCHECK --interval=5s CMD true")[0].startswith(
        "Dockerfile:2: HEALTHCHECK is ignored"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no FROM"),
        ("RUN x", "before the first FROM"),
        ("FROM", "needs an argument"),
        ("FROM a b", "FROM IMAGE AS NAME"),
        ("FROM a AS b\nFROM c AS B", "another stage is called 'b'"),
        ("FROM a AS 1b", "a stage's name"),
        ("FROM x\nONBUILD RUN y", ":2: ONBUILD: is not supported"),
        ("FROM x\nRUNN y", ":2: RUNN: there is no such instruction"),
        ("FROM x\nRUN --network=none y", "--network is not supported"),
        ("FROM x\nRUN --mount=type=secret,id=a y", "--mount=type=secret is not supported"),
        ("FROM x\nRUN --mount=target=/x y", "--mount=type=bind is not supported"),
        ("FROM x\nCOPY --link a b", "--link is not supported"),
        ("FROM x\nCOPY --from= a b", "--from needs a value"),
        ("FROM x\nCOPY --from=a --from=b a b", "--from is there twice"),
        ("FROM x\nADD --checksum=x a b", "--checksum is not supported"),
        ("FROM x\nCOPY a", "a source and a destination"),
        ("FROM x\nSHELL /bin/sh", "the JSON form"),
        ("FROM x\nRUN []", "the list is empty"),
        ("FROM x\nENV a", "has no value"),
        ("FROM x\nENV a=1 b", "has no '='"),
        ("FROM x\nENV =1", "no name before"),
        ("FROM x\n# c\n\nRUN", ":4: RUN: needs an argument"),
        ("#escape=x\nFROM x", "a backslash or a backtick"),
        ("#escape=`\n#escape=`\nFROM x", "there twice"),
        ("FROM x\nRUN a\0b", ":2: a NUL"),
        ("FROM x\n" + "RUN a\n" * 2001, "more than 2000 instructions"),
        ("FROM x\n" * 101, "more than 100 stages"),
        ("FROM x\nRUN " + "a" * 70_000, "more than 65536 characters"),
        ("#" * ((1 << 20) + 1), "more than 1048576 bytes"),
    ],
)
def test_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidArgument) as e:
        parse(text.encode())
    assert told in e.value.message and e.value.message.startswith("Dockerfile:")


PYTHON = """\
# syntax=docker/dockerfile:1
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS base
ENV PYTHONUNBUFFERED=1 \\
    PIP_NO_CACHE_DIR=1
WORKDIR /app
COPY requirements.txt ./
RUN --mount=type=cache,target=/root/.cache/pip pip install -r requirements.txt
COPY . .
EXPOSE 8000/tcp
USER nobody
CMD ["python", "-m", "app"]
"""
NODE = """\
FROM node:20 AS build
WORKDIR /src
COPY package*.json ./
RUN npm ci
COPY . .
RUN npm run build
FROM nginx:alpine
COPY --from=build --chown=nginx:nginx /src/dist /usr/share/nginx/html
HEALTHCHECK CMD curl -f http://localhost/ || exit 1
STOPSIGNAL SIGQUIT
"""
JAVA = """\
FROM maven:3-eclipse-temurin-21 AS build
COPY pom.xml /src/
COPY src /src/src
RUN mvn -f /src/pom.xml package -DskipTests

FROM eclipse-temurin:21-jre
ARG JAR=app.jar
COPY --from=0 /src/target/*.jar /opt/${JAR}
ENTRYPOINT ["java", "-jar", "/opt/app.jar"]
VOLUME ["/data"]
"""
APT = """\
FROM debian:12
LABEL maintainer="some one" \\
      version="1"
# the tools
RUN apt-get update && apt-get install -y --no-install-recommends \\
    # for cloning
    git \\

    curl \\
 && rm -rf /var/lib/apt/lists/*
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN <<EOT
set -e
echo hi | cat
EOT
"""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (PYTHON, [["ENV", "WORKDIR", "COPY", "RUN", "COPY", "EXPOSE", "USER", "CMD"]]),
        (
            NODE,
            [["WORKDIR", "COPY", "RUN", "COPY", "RUN"], ["COPY", "HEALTHCHECK", "STOPSIGNAL"]],
        ),
        (JAVA, [["COPY", "COPY", "RUN"], ["ARG", "COPY", "ENTRYPOINT", "VOLUME"]]),
        (APT, [["LABEL", "RUN", "SHELL", "RUN"]]),
    ],
)
def test_common_files(text: str, names: list[list[str]]) -> None:
    parsed = parse(text.encode())
    assert [[p.name for p in stage.body] for stage in parsed.stages] == names
    again: Dockerfile = parse(text.replace("\n", "\r\n").encode())
    assert [[p.text for p in s.body] for s in again.stages] == [
        [p.text for p in s.body] for s in parsed.stages
    ]


def test_any_bytes_in_bounded_time() -> None:
    """A Dockerfile, or InvalidArgument; nothing else, and soon."""
    rng = random.Random(7)
    seeds = [text.encode() for text in (PYTHON, NODE, JAVA, APT)]
    pieces = [
        b"FROM ",
        b"RUN ",
        b"<<EOF\n",
        b"EOF\n",
        b"\\\n",
        b"${",
        b"}",
        b"'",
        b'"',
        b"--",
        b"=",
        b"[",
        b"]",
    ]
    read = 0
    for number in range(3000):
        data = bytearray(seeds[number % 4])
        for _ in range(rng.randrange(1, 8)):
            place = rng.randrange(len(data))
            what = rng.choice([*pieces, rng.randbytes(3), b""])
            data[place : place + rng.randrange(4)] = what
        read += _reads(bytes(data))
        _reads(rng.randbytes(rng.randrange(200)))
    assert 0 < read < 3000


def _reads(data: bytes) -> bool:
    try:
        return bool(parse(data).stages)
    except InvalidArgument as e:
        return not e.message.startswith("Dockerfile:") and pytest.fail(e.message)


@pytest.mark.parametrize(
    "text",
    [
        "FROM x\nRUN " + "[" * 60_000,
        "FROM x\nRUN " + "<<A " * 15_000,
        "FROM x\nENV " + "a=" * 30_000,
        "FROM x\n" + "RUN <<A\n" * 100_000,
        "\n" * (1 << 20),
        "FROM x\nRUN " + "\\\n" * 500_000,
    ],
)
def test_hostile_in_bounded_time(text: str) -> None:
    start = time.process_time()
    _reads(text.encode())
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("rules", "left_out", "kept"),
    [
        ("*.pyc", ["a.pyc"], ["d/a.pyc", "a.py"]),
        ("**/*.pyc", ["a.pyc", "d/e/a.pyc"], ["a.py"]),
        ("/build", ["build", "build/x/y"], ["a/build"]),
        ("build/", ["build", "build/x"], ["builds"]),
        ("a/**/z", ["a/z", "a/b/z", "a/b/c/z/q"], ["a/b"]),
        ("**", ["a", "a/b"], []),
        ("*\n!README.md", ["x", "docs/README.md"], ["README.md"]),
        ("*.md\n!README*.md\nREADME-secret.md", ["x.md", "README-secret.md"], ["README-a.md"]),
        ("docs\n!docs/keep", ["docs", "docs/x"], ["docs/keep", "docs/keep/y"]),
        ("# a comment\n\n  \n temp? ", ["tempa"], ["temp", "temporary", "# a comment"]),
        ("[a-c].txt", ["b.txt"], ["d.txt"]),
        ("[^a-c].txt", ["d.txt"], ["b.txt"]),
        ("a\\*b", ["a*b"], ["axb"]),
        ("./x/../y", ["y"], ["x"]),
        (".\n/", [], ["a"]),
    ],
)
def test_dockerignore(rules: str, left_out: list[str], kept: list[str]) -> None:
    found = ignore.parse(rules.encode())
    assert [path for path in [*left_out, *kept] if found(path)] == left_out


def test_dockerignore_refused() -> None:
    for bad in ("[a", "a\\", "!", "a\n" * 2001, "x" * 5000):
        with pytest.raises(InvalidArgument, match=r"^\.dockerignore:\d+: "):
            ignore.parse(bad.encode())
    hostile = ignore.parse(("*a" * 1000 + "\n" + "**/" * 1000 + "x").encode())
    start = time.process_time()
    assert not hostile("a" * 2000 + "b") and not hostile("/".join("y" * 500))
    assert time.process_time() - start < 5

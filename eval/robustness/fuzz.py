"""Invalid requests, derived from a service's OpenAPI document. It sends nothing.

Request number i of a seed always has the same bytes, so a run can resume at a number and a finding
can be repeated alone.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import string
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from PIL import Image

ODD_NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400),
    *(0.0, -0.0, 0.5, 1e-308, 5e-324, 1e308, -1e308, 1.0000000001),
)
ODD_TEXTS = (
    *("", " ", "\0", "a\0b", "\n", "\ud800", "\U0001f6a2", "e\u0301", "\u202e", "\ufeff", "ﬀ", "ß"),
    *("null", "NaN", "auto", "1024x1024", "64x64", "0x0", "99999x99999", "1e3x1e3", "64X64"),
    "６４x６４",
    *("(a:1.3)", "((((", "(a:nan)", "(a:1e999)", "BREAK", "<lora:x:1>", "../../etc/passwd", "%00"),
    *("<script>", "'; DROP TABLE", "${jndi:x}", "{{7*7}}", "\r\nx-a: b", "a" * 3999, "円" * 4001),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"a": 1}, {"": ""}, ["a"] * 50)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "get", "A" * 40)
TYPES = (
    *("application/json", "application/json; charset=utf-16", "application/json;;;", ""),
    *("text/plain", "application/x-www-form-urlencoded"),
    *("multipart/form-data", "multipart/form-data; boundary=x"),
    *("image/png", "application/jsonp", "*/*", "a" * 500),
)
ODD_HEADERS: tuple[tuple[str, Sequence[str]], ...] = (
    ("content-type", TYPES),
    ("x-deadline-s", ("0", "-1", "nan", "inf", "1e400", "", "a", "0x5", "1_0", "5 ", "٣")),
    ("x-request-id", ("<b>", "a" * 5000, "é", "", " ", "a,b")),
    ("x-request-timeout-seconds", ("inf", "0", "-1", "nan", "a")),
    ("x-request-disconnect-disabled", ("1", "true", "")),
    ("authorization", ("Bearer", "Bearer ", "Basic !!!", "Bearer é", "a" * 9000)),
    ("accept", ("", "text/event-stream", "*/*;q=2", "a" * 3000)),
    ("accept-encoding", ("gzip, br, zstd", "*;q=0", "identity;q=0")),
    ("content-encoding", ("gzip", "br", "identity, gzip")),
    ("traceparent", ("00-" + "f" * 32 + "-" + "f" * 16 + "-01", "00-0-0-00", "a")),
    ("range", ("bytes=0-1", "bytes=-1", "bytes=9-1,0-0")),
    ("expect", ("100-continue", "200-ok")),
    ("cookie", ("a=b; " * 500, "\x7f")),
    ("origin", ("null", "https://evil.example")),
    ("upgrade", ("websocket", "h2c")),
    ("serve_multiplexed_model_id", ("a", "")),
    ("x-forwarded-host", ("evil.example", "")),
)
PATHS = (
    *("/", "//", "/v1", "/v1/", "/v1//models", "/v1/models/%2e%2e", "/v1/results/", "/docs"),
    *("/../", "/v1/results/..%2f..%2fetc%2fpasswd", "/v1/results/" + "a" * 43 + ".png"),
    *("/-/routes", "/%00"),
    *("/v1/models/" + "a" * 4000, "/v1/models/%ff", "/v1/images/generations/", "/v1/images/edits"),
    *("/openapi.json", "/favicon.ico", "/web/../api.py", "/-/healthz", "*", "/?a=b&a=%", "/é"),
)
RAW = (
    b"\r\n\r\n\r\n",
    b"\0" * 1000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 64,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.1\nHost: a\nConnection: close\n\n",
    b"GET /healthz HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.1\r\n: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n folded: b\r\n\r\n",
    b"GET / HTTP/1.1\r\na\x00b: c\r\n\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % i for i in range(2000)) + b"\r\n",
    b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\nConnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
)
CHUNKS = (
    b"0\r\n\r\n",
    b"5\r\nabcde\r\n0\r\n\r\n",
    b"zz\r\n",
    b"-1\r\na\r\n",
    (ENDLESS := b"ffffffffffffffff\r\n"),
)
BOUNDARIES = ("x", "x", "x", "x", "", "x" * 71, "\u00e9", '"x"')
CHARSETS = ("", "", "", "utf-8", "undefined", "punycode", "unicode_escape", "idna", "utf-16", "\0")
FILE_NAMES = ("a.png", "a.jsonl", "", "../a", "\\ud800", "a\0", "a" * 3000, "\u5186")
TWICE = b'{"prompt": "a", "prompt": "b", "seed": NaN, "n": 1e999}'
PREFIXES = (b"\xef\xbb\xbf", b"\xff\xfe", b"[", b"\0", b" " * 1000)
CHEAP = {"steps": 1, "size": "64x64", "n": 1, "max_tokens": 2, "max_completion_tokens": 2}
"""values that keep a valid request short"""
USUAL = {**CHEAP, "model": None}
"""An unknown model's name would refuse every request early."""
JSON, FORM = "application/json", "multipart/form-data"
Make = Callable[[random.Random], bytes | tuple[bytes, ...]]
Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    parts: tuple[bytes, ...]

    @property
    def is_http(self) -> bool:
        """False for bytes that are not HTTP, which the parser refuses in its own words."""
        return self.kind not in ("chunked", "raw", "pipelined")

    @property
    def half_closes(self) -> bool:
        """True after incomplete bytes, or the service may wait for the rest."""
        return self.kind == "raw" or self.parts[-1] == ENDLESS


class Fuzzer:
    """Cases by number, from a service's own OpenAPI document."""

    def __init__(self, openapi: Schema, host: str, seed: int) -> None:
        self.schemas = openapi.get("components", {}).get("schemas", {})
        self.host, self.seed, self.files = host, seed, files()
        operations = [
            (method.upper(), path, operation.get("requestBody", {}).get("content", {}))
            for path, methods in sorted(openapi["paths"].items())
            for method, operation in sorted(methods.items())
        ]
        self.routes = [(m, p, bodies.get(JSON, {}).get("schema")) for m, p, bodies in operations]
        self.bodies = [(method, path, schema) for method, path, schema in self.routes if schema]
        self.form_bodies = [
            (m, p, bodies[FORM]["schema"]) for m, p, bodies in operations if FORM in bodies
        ]
        self.kinds: dict[Make, float] = {
            self.valid: 0.10,
            self.mutated: 0.30,
            self.forms: 0.16,
            self.garbled: 0.10,
            self.headers: 0.12,
            self.paths: 0.08,
            self.pipelined: 0.06,
            self.chunked: 0.04,
            self.raw: 0.04,
        }

    def case(self, number: int) -> Case:
        rng = random.Random(f"{self.seed}-{number}")
        (make,) = rng.choices([*self.kinds], [*self.kinds.values()])
        parts = make(rng)
        return Case(number, make.__name__, (parts,) if isinstance(parts, bytes) else parts)

    def valid(self, rng: random.Random) -> bytes:
        return self.headers(rng, most=0)

    def headers(self, rng: random.Random, most: int = 3) -> bytes:
        """Valid JSON with odd headers."""
        method, path, schema = rng.choice(self.routes)
        odd = rng.sample(ODD_HEADERS, rng.randint(min(most, 1), most))
        more = [(name, rng.choice(values)) for name, values in odd]
        word = "".join(rng.choices(string.ascii_letters + "%._-", k=rng.randint(1, 50)))
        path = path.partition("{")[0] + word if "{" in path else path
        body = json_of(self._value(schema, rng)) if schema else b""
        return self._request(method, path, body, more)

    def mutated(self, rng: random.Random) -> bytes:
        """Valid JSON with a few wrong values."""
        method, path, schema = rng.choice(self.bodies)
        body = self._value(schema, rng)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            mutate(body, rng)
        return self._request(method, path, json_of(body))

    def garbled(self, rng: random.Random) -> bytes:
        """Damaged JSON."""
        method, path, schema = rng.choice(self.bodies)
        text = json_of(self._value(schema, rng))
        cut, length = rng.randrange(len(text)), rng.randint(1, 6)
        damaged = (
            text[:cut],
            text[:cut] + rng.randbytes(length) + text[cut + length :],
            rng.choice(PREFIXES) + text,
            text.decode().encode(rng.choice(("utf-16", "utf-32", "utf-7"))),
            b"[" * rng.choice((10, 40, 5000)),
            b'{"prompt": "' + b"a" * rng.choice((5000, 250_000, 300_000)) + b'"}',
            2 * text,
            TWICE,
        )
        return self._request(method, path, rng.choice(damaged))

    def forms(self, rng: random.Random) -> bytes:
        """Files and fields, with odd names, charsets and boundaries."""
        method, path, schema = rng.choice(self.form_bodies)
        fields = self._value(schema, rng)
        for _ in range(rng.choice((0, 1, 1, 2))):
            mutate(fields, rng)
        boundary, charset = rng.choice(BOUNDARIES), rng.choice(CHARSETS)
        kind = f"{FORM}; boundary={boundary}" + f"; charset={charset}" * bool(charset)
        line = b"--" + boundary.strip('"').encode()
        body = b"".join(
            line + b"\r\n" + field_part(name, each, rng) + b"\r\n"
            for name, value in fields.items()
            for each in (value if isinstance(value, list) else [value])
        )
        body += line + b"--\r\n"
        body = body[: rng.randrange(len(body))] if rng.random() < 0.1 else body
        return self._request(method, path, body, [("content-type", kind)])

    def paths(self, rng: random.Random) -> bytes:
        _, known, _ = rng.choice(self.routes)
        longer = known + rng.choice(("/", "?x=" + "a" * 3000, "%0a"))
        path = rng.choice((rng.choice(PATHS), known, longer))
        return self._request(rng.choice(METHODS), path.replace("{", "%7B"))

    def pipelined(self, rng: random.Random) -> tuple[bytes, ...]:
        """Several requests on one connection, cut at random places."""
        paths = rng.choices(("/healthz", "/v1/models", "/nowhere"), k=rng.randint(2, 6))
        data = b"".join(
            f"GET {path} HTTP/1.1\r\nhost: {self.host}\r\n\r\n".encode() for path in paths
        )
        data += self.mutated(rng)
        cuts = sorted(rng.sample(range(1, len(data)), 3))
        return tuple(data[a:b] for a, b in itertools.pairwise((0, *cuts, len(data))))

    def chunked(self, rng: random.Random) -> tuple[bytes, ...]:
        head = f"POST {rng.choice(self.routes)[1]} HTTP/1.1\r\nHost: {self.host}\r\n"
        head += rng.choice(("", "Content-Length: 5\r\n", "Transfer-Encoding: identity\r\n"))
        chunked = "Transfer-Encoding: chunked"
        head += rng.choice((chunked, f"{chunked}, chunked", "transfer-encoding:\tchunked"))
        return f"{head}\r\nConnection: close\r\n\r\n".encode(), rng.choice(CHUNKS)

    def raw(self, rng: random.Random) -> bytes:
        return rng.choice(RAW) if rng.random() < 0.7 else rng.randbytes(rng.randint(1, 4000))

    def _request(
        self, method: str, path: str, body: bytes = b"", more: Sequence[tuple[str, str]] = ()
    ) -> bytes:
        lines = [("host", self.host), ("connection", "close"), *more]
        if body and "content-type" not in dict(more):
            lines.append(("content-type", JSON))
        if body or method == "POST":
            lines.append(("content-length", str(len(body))))
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {v}\r\n" for name, v in lines)
        return head.encode("utf-8", "surrogatepass") + b"\r\n" + body

    def _value(self, schema: Schema, rng: random.Random) -> Any:
        """A valid value with some of the optional fields."""
        if "$ref" in schema:
            return self._value(self.schemas[schema["$ref"].rpartition("/")[2]], rng)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self._value(rng.choice(schema[several]), rng)
        if "enum" in schema or "const" in schema:
            return rng.choice(schema.get("enum", [schema.get("const")]))
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        match schema.get("type"):
            case "object":
                fields, required = schema.get("properties", {}), schema.get("required", ())
                names = [name for name in fields if name in required or rng.random() < 0.25]
                values = {name: self._value(fields[name], rng) for name in names}
                return values | {name: value for name, value in USUAL.items() if name in fields}
            case "array":
                least, items = schema.get("minItems", 1), schema.get("items", {"type": "string"})
                return [self._value(items, rng) for _ in range(rng.randint(least, max(least, 2)))]
            case "integer":
                return rng.choice((int(low), int(low) + 1, int(schema.get("maximum", low + 7))))
            case "number":
                return low + rng.random()
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case _ if schema.get("format") == "binary":
                return rng.choice(self.files)
            case _ if rng.random() < 0.2:
                coded = b64encode(rng.choice(self.files)).decode()
                return rng.choice(("", "data:image/png;base64,")) + coded
            case _:
                return rng.choice(("a red circle", "64x64", "auto", "a star, 円"))


def json_of(value: Any) -> bytes:
    # ASCII escapes: lone surrogates cannot be encoded.
    return json.dumps(value).encode()


def field_part(name: str, value: Any, rng: random.Random) -> bytes:
    head = f'content-disposition: form-data; name="{name}"'
    if isinstance(value, bytes):
        head += f'; filename="{rng.choice(FILE_NAMES)}"'
    elif not isinstance(value, str):
        value = json.dumps(value)
    data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    return head.encode("utf-8", "surrogatepass") + b"\r\n\r\n" + data


def files() -> tuple[bytes, ...]:
    """Pictures and lists of requests, good ones and broken ones."""
    pictures = list(saved_pictures())
    palette = pictures[2]
    start = palette.index(b"PLTE") - 4
    end = start + 12 + int.from_bytes(palette[start : start + 4], "big")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/images/generations", "body": {}}
    changes = {"body": {"prompt": "a ring", "steps": 1}}, {"custom_id": "\ud800"}, {"url": None}
    lines = [*(json.dumps(line | change) for change in changes), "{"]
    return (
        *pictures,
        *(data[: len(data) // 2] for data in pictures),
        palette[:start] + palette[end:],
        *("\n".join(lines[i:]).encode() for i in range(len(lines))),
        *(b"", b"\0" * 100, b"GIF89a", b"<svg/>"),
    )


def saved_pictures() -> Iterator[bytes]:
    formats = ("RGB", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("L", "JPEG"), ("1", "PNG")
    for mode, format in formats:
        buffer = io.BytesIO()
        Image.new("RGB", (64, 64), "red").convert(mode).save(buffer, format)
        yield buffer.getvalue()


def mutate(value: Any, rng: random.Random) -> None:
    """Change one place of the value, in place."""
    # A copy, because a later mutation may change the inserted value.
    odd = deepcopy(rng.choice((rng.choice(ODD_NUMBERS), rng.choice(ODD_TEXTS), rng.choice(OTHERS))))
    if isinstance(value, list):
        if value and isinstance(value[0], dict | list) and rng.random() < 0.8:
            mutate(value[0], rng)
        else:
            value[: rng.randint(0, 1)] = [odd]
        return
    if not isinstance(value, dict):
        return
    name = rng.choice([*value, "an unknown field"])
    inner = value.get(name)
    if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
        mutate(inner, rng)
    elif rng.random() < 0.15:
        value.pop(name, None)
    elif rng.random() < 0.1:
        value[rng.choice(ODD_TEXTS)] = odd
    else:
        value[name] = odd

"""Invalid requests, derived from a service's OpenAPI document. It sends nothing.

Request number i of a seed always has the same bytes, so a run can resume at a number and a finding
can be repeated alone.
"""

from __future__ import annotations

import io
import json
import random
import string
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
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
RAW: tuple[tuple[bytes, ...], ...] = (
    (b"\r\n\r\n\r\n",),
    (b"\0" * 1000,),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 64,),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",),
    (b"GET / HTTP/9.9\r\n\r\n",),
    (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",),
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n",),
    (b"GET / HTTP/1.1\nHost: a\nConnection: close\n\n",),
    (b"GET /healthz HTTP/1.0\r\n\r\n",),
    (b"GET / HTTP/1.1\r\n: a\r\n\r\n",),
    (b"GET / HTTP/1.1\r\nHost: a\r\n folded: b\r\n\r\n",),
    (b"GET / HTTP/1.1\r\na\x00b: c\r\n\r\n",),
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",),
    (b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % i for i in range(2000)) + b"\r\n",),
    (b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\nConnection: close\r\n\r\n",),
    (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",),
    (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",),
    (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",),
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
CHEAP = {"steps": 1, "size": "64x64", "n": 1, "max_tokens": 2, "max_completion_tokens": 2}
"""values that keep a valid request short"""


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    parts: tuple[bytes, ...]
    is_http: bool = True
    """False for bytes that are not HTTP, which the parser refuses in its own words"""
    half_closes: bool = False


class Fuzzer:
    """Cases by number, from a service's own OpenAPI document."""

    def __init__(self, openapi: Mapping[str, Any], host: str, seed: int) -> None:
        self.schemas = openapi.get("components", {}).get("schemas", {})
        self.host, self.seed = host, seed
        operations = [
            (method.upper(), path, operation)
            for path, operations in sorted(openapi["paths"].items())
            for method, operation in sorted(operations.items())
        ]
        self.routes = [(m, p, body_schema(o, "application/json")) for m, p, o in operations]
        self.form_routes = [
            (method, path, schema)
            for method, path, operation in operations
            if (schema := body_schema(operation, "multipart/form-data"))
        ]
        self.files = files()
        self.kinds: tuple[tuple[float, Callable[[random.Random], tuple[bytes, ...]]], ...] = (
            (0.10, self.valid),
            (0.30, self.mutated),
            (0.16, self.forms),
            (0.10, self.garbled),
            (0.12, self.headers),
            (0.08, self.paths),
            (0.06, self.pipelined),
            (0.04, self.chunked),
            (0.04, self.raw),
        )

    def case(self, number: int) -> Case:
        rng = random.Random(f"{self.seed}-{number}")
        make = rng.choices([make for _, make in self.kinds], [share for share, _ in self.kinds])[0]
        kind = make.__name__
        parts = make(rng)
        # After incomplete bytes the client half-closes, or the service may wait for the rest.
        return Case(
            number,
            kind,
            parts,
            kind not in ("chunked", "raw", "pipelined"),
            half_closes=kind == "raw" or parts[-1] == ENDLESS,
        )

    # -- kinds ------------------------------------------------------------------------------

    def valid(self, rng: random.Random) -> tuple[bytes, ...]:
        method, path, schema = rng.choice(self.routes)
        return self._request(method, self._filled(path, rng), self._json(self._value(schema, rng)))

    def mutated(self, rng: random.Random) -> tuple[bytes, ...]:
        """Valid JSON with a few wrong values."""
        method, path, schema = rng.choice([route for route in self.routes if route[2]])
        body = self._value(schema, rng)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            mutate(body, rng)
        return self._request(method, path, self._json(body))

    def garbled(self, rng: random.Random) -> tuple[bytes, ...]:
        """Damaged JSON."""
        method, path, schema = rng.choice([route for route in self.routes if route[2]])
        data = bytearray(self._json(self._value(schema, rng)))
        match rng.randrange(8):
            case 0:
                del data[rng.randrange(len(data)) :]
            case 1:
                for _ in range(rng.randint(1, 6)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
            case 2:
                data[0:0] = rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"[", b"\0", b" " * 1000))
            case 3:
                data = bytearray(data.decode().encode(rng.choice(("utf-16", "utf-32", "utf-7"))))
            case 4:
                data = bytearray(b"[" * rng.choice((10, 40, 5000)))
            case 5:
                data = bytearray(b'{"prompt": "a", "prompt": "b", "seed": NaN, "n": 1e999}')
            case 6:
                data = bytearray(
                    b'{"prompt": "' + b"a" * rng.choice((5000, 250_000, 300_000)) + b'"}'
                )
            case _:
                data *= 2
        return self._request(method, path, bytes(data))

    def forms(self, rng: random.Random) -> tuple[bytes, ...]:
        """Files and fields, with odd names, charsets and boundaries."""
        method, path, schema = rng.choice(self.form_routes)
        fields = self._value(schema, rng)
        for _ in range(rng.choice((0, 1, 1, 2))):
            mutate(fields, rng)
        boundary, charset = rng.choice(BOUNDARIES), rng.choice(CHARSETS)
        kind = f"multipart/form-data; boundary={boundary}" + f"; charset={charset}" * bool(charset)
        parts = [
            field_part(name, each, rng)
            for name, value in fields.items()
            for each in (value if isinstance(value, list) else [value])
        ]
        line = b"--" + boundary.strip('"').encode()
        body = b"".join(line + b"\r\n" + part + b"\r\n" for part in parts) + line + b"--\r\n"
        if rng.random() < 0.1:
            body = body[: rng.randrange(len(body))]
        return self._request(method, path, body, [("content-type", kind)])

    def headers(self, rng: random.Random) -> tuple[bytes, ...]:
        method, path, schema = rng.choice(self.routes)
        more = []
        for _ in range(rng.randint(1, 3)):
            name, values = rng.choice(ODD_HEADERS)
            more.append((name, rng.choice(values)))
        if rng.random() < 0.4:
            more.append(("content-type", rng.choice(TYPES)))
        return self._request(
            method, self._filled(path, rng), self._json(self._value(schema, rng)), more
        )

    def paths(self, rng: random.Random) -> tuple[bytes, ...]:
        known = rng.choice([path for _, path, _ in self.routes])
        path = rng.choice(
            (rng.choice(PATHS), known, known + rng.choice(("/", "?x=" + "a" * 3000, "%0a")))
        )
        return self._request(rng.choice(METHODS), path.replace("{", "%7B"), b"")

    def pipelined(self, rng: random.Random) -> tuple[bytes, ...]:
        """Several requests on one connection, cut at random places."""
        data = b""
        for _ in range(rng.randint(2, 6)):
            data += self._request(
                "GET", rng.choice(("/healthz", "/v1/models", "/nowhere")), b"", close=False
            )[0]
        data += self.mutated(rng)[0]
        cuts = sorted(rng.sample(range(1, len(data)), 3))
        return tuple(data[a:b] for a, b in zip((0, *cuts), (*cuts, len(data)), strict=True))

    def chunked(self, rng: random.Random) -> tuple[bytes, ...]:
        head = f"POST {rng.choice(self.routes)[1]} HTTP/1.1\r\nHost: {self.host}\r\n"
        head += rng.choice(("", "Content-Length: 5\r\n", "Transfer-Encoding: identity\r\n"))
        chunked = "Transfer-Encoding: chunked"
        head += rng.choice((chunked, f"{chunked}, chunked", "transfer-encoding:\tchunked"))
        return (f"{head}\r\nConnection: close\r\n\r\n".encode(), rng.choice(CHUNKS))

    def raw(self, rng: random.Random) -> tuple[bytes, ...]:
        if rng.random() < 0.7:
            return rng.choice(RAW)
        return (rng.randbytes(rng.randint(1, 4000)),)

    # -- parts ------------------------------------------------------------------------------

    def _request(
        self,
        method: str,
        path: str,
        body: bytes,
        more: Sequence[tuple[str, str]] = (),
        *,
        close: bool = True,
    ) -> tuple[bytes, ...]:
        names = {name for name, _ in more}
        lines = [("host", self.host), *(("connection", "close"),) * close, *more]
        if body and "content-type" not in names:
            lines.append(("content-type", "application/json"))
        if body or method == "POST":
            lines.append(("content-length", str(len(body))))
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {v}\r\n" for name, v in lines)
        return (head.encode("utf-8", "surrogatepass") + b"\r\n" + body,)

    def _filled(self, path: str, rng: random.Random) -> str:
        """The path with random words as its parameters."""
        word = "".join(rng.choices(string.ascii_letters + "%._-", k=rng.randint(1, 50)))
        return path if "{" not in path else path.partition("{")[0] + word

    @staticmethod
    def _json(value: Any) -> bytes:
        # ASCII escapes: lone surrogates cannot be encoded.
        return b"" if value is None else json.dumps(value).encode()

    def _value(self, schema: Mapping[str, Any] | None, rng: random.Random) -> Any:
        """A valid value with some of the optional fields."""
        if schema is None:
            return None
        if "$ref" in schema:
            return self._value(self.schemas[schema["$ref"].rpartition("/")[2]], rng)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self._value(rng.choice(schema[several]), rng)
        if "enum" in schema or "const" in schema:
            return rng.choice(schema.get("enum", [schema.get("const")]))
        match schema.get("type"):
            case "object":
                return self._object(schema, rng)
            case "array":
                count = rng.randint(schema.get("minItems", 1), max(schema.get("minItems", 1), 2))
                return [
                    self._value(schema.get("items", {"type": "string"}), rng) for _ in range(count)
                ]
            case "integer":
                low = int(schema.get("minimum", 0))
                return rng.choice((low, low + 1, int(schema.get("maximum", low + 7))))
            case "number":
                low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
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

    def _object(self, schema: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        names = [n for n in properties if n in required or rng.random() < 0.25]
        values = {name: self._value(properties[name], rng) for name in names}
        return {
            **values,
            **{n: v for n, v in CHEAP.items() if n in properties},
            **self._default_model(properties),
        }

    @staticmethod
    def _default_model(properties: Mapping[str, Any]) -> dict[str, Any]:
        """An unknown model's name would refuse every request early."""
        return {"model": None} if "model" in properties else {}


def body_schema(operation: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    content = operation.get("requestBody", {}).get("content", {})
    schema: Mapping[str, Any] | None = content.get(kind, {}).get("schema")
    return schema


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
    good, saved = Image.new("RGB", (64, 64), "red"), []
    for mode, format in (
        ("RGB", "PNG"),
        ("RGBA", "PNG"),
        ("P", "PNG"),
        ("L", "JPEG"),
        ("1", "PNG"),
    ):
        buffer = io.BytesIO()
        good.convert(mode).save(buffer, format)
        saved.append(buffer.getvalue())
    palette = saved[2]
    start = palette.index(b"PLTE") - 4
    end = start + 12 + int.from_bytes(palette[start : start + 4], "big")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/images/generations", "body": {}}
    lines = [
        json.dumps(line | {"body": {"prompt": "a ring", "steps": 1}}),
        json.dumps(line | {"custom_id": "\ud800"}),
        json.dumps(line | {"url": None}),
        "{",
    ]
    return (
        *saved,
        *(data[: len(data) // 2] for data in saved),
        palette[:start] + palette[end:],
        *("\n".join(lines[i:]).encode() for i in range(len(lines))),
        *(b"", b"\0" * 100, b"GIF89a", b"<svg/>"),
    )


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
    name = rng.choice([*value, "a field nobody knows"])
    inner = value.get(name)
    if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
        mutate(inner, rng)
    elif rng.random() < 0.15:
        value.pop(name, None)
    elif rng.random() < 0.1:
        value[rng.choice(ODD_TEXTS)] = odd
    else:
        value[name] = odd

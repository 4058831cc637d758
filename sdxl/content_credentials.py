"""Writes C2PA manifests into new pictures, and reads them for `sdxl verify`.

It uses c2pa-python, an extra (`pip install 'sdxl-deepcache[c2pa]'`). It uses no network, neither
for remote manifests nor for the state of a certificate.
"""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import sdxl
from sdxl.files import locked, prepare_folder, write_atomic
from sdxl.params import InvalidParams
from sdxl.places import home

log = logging.getLogger(__name__)

SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
"""IPTC's code for pictures that a trained model generated"""
GENERATOR = "sdxl-deepcache"
SELF_MADE = "sdxl-deepcache, self-made certificate"
"""the name in a self-made certificate"""
VALID = timedelta(days=3650)
SETTINGS = {
    # A thumbnail would be about as large as the picture.
    "builder": {"thumbnail": {"enabled": False}},
    "verify": {"remote_manifest_fetch": False, "ocsp_fetch": False},
}
UNTRUSTED = "signingCredential.untrusted"
CURVES = {"secp256r1": "es256", "secp384r1": "es384", "secp521r1": "es512"}


class NoContentCredentials(RuntimeError):
    """c2pa-python is not installed."""


@dataclass(frozen=True)
class Claim:
    """A picture's manifest, checked."""

    generator: str
    source_type: str
    signer: str
    is_intact: bool
    """True if the picture is unchanged since it was signed"""
    is_trusted: bool
    failures: tuple[str, ...]


def signer_of(
    certificate: str, private_key: str, is_watermarked: bool
) -> Callable[[bytes, str], bytes]:
    """Return a function that adds a manifest to a file. Raise InvalidParams for a key or
    certificate that cannot sign. `is_watermarked` is stated in the manifest."""
    c2pa = _library()
    if certificate:
        chain, key = (Path(p).expanduser().read_bytes() for p in (certificate, private_key))
    else:
        chain, key = self_made()
        log.warning(
            "c2pa: signing with a self-made certificate, which verifiers will call untrusted; use "
            "--certificate and --private-key for your own"
        )
    info = c2pa.C2paSignerInfo(
        alg=algorithm_of(key, private_key).encode(), sign_cert=chain, private_key=key, ta_url=None
    )
    thread, manifest = threading.local(), _manifest(is_watermarked)

    def sign(file: bytes, format: str) -> bytes:
        if not hasattr(thread, "signer"):
            thread.signer = c2pa.Signer.from_info(info)
        signed = io.BytesIO()
        with c2pa.Builder(manifest, _context()) as builder:
            builder.sign(thread.signer, f"image/{format}", io.BytesIO(file), signed)
        return signed.getvalue()

    _check(sign, certificate)
    return sign


def read_claim(file: bytes, format: str, trusted: bytes = b"") -> Claim | None:
    """Read a picture's manifest; None if it has none. `trusted`: trusted root certificates, PEM."""
    c2pa = _library()
    try:
        with c2pa.Reader(f"image/{format}", io.BytesIO(file), context=_context(trusted)) as reader:
            report = json.loads(reader.json())
    except c2pa.C2paError.ManifestNotFound:
        return None
    except c2pa.C2paError as error:
        return Claim("", "", "", False, False, (" ".join(str(error).split())[:200],))
    return _claim(report)


def root_certificates(file: bytes, name: str) -> bytes:
    """Return a file's PEM certificates without the text between them. Raise InvalidParams."""
    _library()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        roots = x509.load_pem_x509_certificates(file)
    except ValueError as error:
        raise InvalidParams("trust", name, "must be a file of PEM certificates") from error
    return b"".join(root.public_bytes(Encoding.PEM) for root in roots)


def _claim(report: Mapping[str, Any]) -> Claim:
    manifest = report.get("manifests", {}).get(report.get("active_manifest"), {})
    signature = manifest.get("signature_info", {})
    codes = tuple(status["code"] for status in report.get("validation_status", []))
    generators = manifest.get("claim_generator_info") or [{}]
    return Claim(
        generator=" ".join(str(generators[0].get(k, "")) for k in ("name", "version")).strip(),
        source_type=_source_type(manifest),
        signer=signature.get("common_name") or signature.get("issuer") or "",
        is_intact=report.get("validation_state") in ("Valid", "Trusted"),
        is_trusted=report.get("validation_state") == "Trusted",
        failures=tuple(code for code in codes if code != UNTRUSTED),
    )


def _source_type(manifest: Mapping[str, Any]) -> str:
    for assertion in manifest.get("assertions", []):
        if assertion.get("label", "").startswith("c2pa.actions"):
            for action in assertion["data"].get("actions", []):
                if source := action.get("digitalSourceType"):
                    return str(source)
    return ""


def algorithm_of(key: bytes, name: str) -> str:
    """Return C2PA's name for the key's algorithm."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    needed = "must be an unencrypted PEM key: EC P-256, P-384 or P-521, RSA or Ed25519"
    try:
        loaded = load_pem_private_key(key, password=None)
    except (TypeError, ValueError) as error:
        raise InvalidParams("private_key", name, needed) from error
    if isinstance(loaded, ed25519.Ed25519PrivateKey):
        return "ed25519"
    if isinstance(loaded, rsa.RSAPrivateKey):
        return "ps256"
    if isinstance(loaded, ec.EllipticCurvePrivateKey) and loaded.curve.name in CURVES:
        return CURVES[loaded.curve.name]
    raise InvalidParams("private_key", name, needed)


def self_made() -> tuple[bytes, bytes]:
    """Return the self-made certificate chain and its key, which are created once for a user."""
    folder = home() / "provenance"
    paths = folder / "certificate.pem", folder / "private_key.pem"
    if not all(path.exists() for path in paths):
        prepare_folder(folder)
        folder.chmod(0o700)
        with locked(folder / ".lock"):
            # Another process may have created them meanwhile.
            if not all(path.exists() for path in paths):
                for path, content in zip(paths, _new_certificate(), strict=True):
                    write_atomic(path, content)
                    path.chmod(0o600)
    chain, key = (path.read_bytes() for path in paths)
    return chain, key


def _new_certificate() -> tuple[bytes, bytes]:
    """Create a signing certificate and its root, since C2PA refuses self-signed certificates."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root_name, name = _named("root of a self-made certificate"), _named(SELF_MADE)
    root = _certificate(root_name, root_name, root_key.public_key(), is_root=True)
    leaf = _certificate(name, root_name, key.public_key(), is_root=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key())
    signed = [
        each.add_extension(issuer, critical=False).sign(root_key, hashes.SHA256())
        for each in (leaf, root)
    ]
    chain = b"".join(each.public_bytes(serialization.Encoding.PEM) for each in signed)
    return chain, key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _named(text: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    parts = ((NameOID.COMMON_NAME, text), (NameOID.ORGANIZATION_NAME, GENERATOR))
    return x509.Name([x509.NameAttribute(kind, value) for kind, value in parts])


def _certificate(name: Any, issuer: Any, public_key: Any, *, is_root: bool) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    now = datetime.now(UTC)
    usages = dict.fromkeys(
        (
            *("content_commitment", "key_encipherment", "data_encipherment"),
            *("key_agreement", "encipher_only", "decipher_only"),
        ),
        False,
    )
    usage = x509.KeyUsage(
        digital_signature=not is_root, key_cert_sign=is_root, crl_sign=is_root, **usages
    )
    builder = (
        x509.CertificateBuilder(issuer, name, public_key, x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(is_root, 0 if is_root else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )
    if is_root:
        return builder
    purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION])
    return builder.add_extension(purpose, critical=False)


def _check(sign: Callable[[bytes, str], bytes], certificate: str) -> None:
    """Sign a test picture. Raise InvalidParams for a wrong key or an expired certificate."""
    from PIL import Image

    from sdxl.picture_files import file_of

    c2pa = _library()
    try:
        claim = read_claim(sign(file_of(Image.new("RGB", (8, 8))), "png"), "png")
        cause = ", ".join(claim.failures) if claim is not None else "no manifest"
        is_good = claim is not None and claim.is_intact
    except c2pa.C2paError as error:
        is_good, cause = False, " ".join(str(error).split())[:200]
    if not is_good:
        needed = f"must be a certificate chain for C2PA, with its own private_key ({cause})"
        raise InvalidParams("certificate", certificate, needed)


def _manifest(is_watermarked: bool) -> dict[str, Any]:
    agent = {"name": GENERATOR, "version": sdxl.__version__}
    created = {"action": "c2pa.created", "digitalSourceType": SOURCE_TYPE, "softwareAgent": agent}
    # "Unbound": the watermark has no link to this manifest.
    watermarked = {"action": "c2pa.watermarked.unbound", "softwareAgent": agent}
    actions = [created, watermarked] if is_watermarked else [created]
    return {
        "claim_generator_info": [agent],
        "assertions": [{"label": "c2pa.actions.v2", "data": {"actions": actions}}],
    }


@cache
def _context(trusted: bytes = b"") -> Any:
    """Return the library's settings; `trusted`: trusted root certificates."""
    more = {"trust": {"user_anchors": trusted.decode()}} if trusted else {}
    return _library().Context.from_dict({**SETTINGS, **more})


def _library() -> Any:
    try:
        import c2pa
    except ImportError as error:
        raise NoContentCredentials(
            "provenance c2pa needs c2pa-python; run pip install 'sdxl-deepcache[c2pa]'"
        ) from error
    return c2pa

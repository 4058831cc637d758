"""The marks that say that a picture was generated: in metadata, in a signed manifest, in pixels.

The metadata has IPTC's digital source type. content_credentials.py writes C2PA manifests, and
watermark.py marks pixels. This module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdxl.content_credentials import SOURCE_TYPE, signer_of
from sdxl.params import InvalidParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

AND_WATERMARK = "+watermark"
OFF, METADATA, C2PA = "off", "metadata", "c2pa"
PROVENANCES = (OFF, METADATA, C2PA, METADATA + AND_WATERMARK, C2PA + AND_WATERMARK)
XMP = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
    '<x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about="" '
    'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" '
    f'Iptc4xmpExt:DigitalSourceType="{SOURCE_TYPE}"/>'
    "</rdf:RDF></x:xmpmeta>"
    '<?xpacket end="w"?>'
)
HELP = f"how pictures are marked as generated: {', '.join(PROVENANCES)}"
CERTIFICATE = "PEM file: the certificate chain that c2pa signs with; one is made unless given"
PRIVATE_KEY = "PEM file: that certificate's private key"


@dataclass(frozen=True)
class Provenance:
    """The operator's choice. It is checked here, before anything is loaded."""

    kind: str = METADATA
    certificate: str = ""
    private_key: str = ""

    def __post_init__(self) -> None:
        if self.kind not in PROVENANCES:
            raise InvalidParams.unknown("provenance", self.kind, PROVENANCES)
        if bool(self.certificate) != bool(self.private_key):
            missing = "certificate" if self.private_key else "private_key"
            raise InvalidParams(
                missing,
                "",
                "must be given with its counterpart: certificate and private_key belong together",
            )
        for name in ("certificate", "private_key"):
            path = getattr(self, name)
            if path and not Path(path).expanduser().is_file():
                raise InvalidParams(name, path, "must be a PEM file")

    @property
    def xmp(self) -> str | None:
        """The metadata packet."""
        return None if self.kind == OFF else XMP

    @property
    def is_signed(self) -> bool:
        return self.kind.removesuffix(AND_WATERMARK) == C2PA

    @property
    def is_watermarked(self) -> bool:
        return self.kind.endswith(AND_WATERMARK)

    def mark(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Add the watermark to pixels, if chosen."""
        if not self.is_watermarked:
            return pixels
        from sdxl.watermark import mark

        return mark(pixels)

    @cached_property
    def sign(self) -> Callable[[bytes, str], bytes]:
        """A function that adds a manifest to a picture's file, if chosen."""
        if not self.is_signed:
            return lambda file, format: file
        return signer_of(self.certificate, self.private_key, self.is_watermarked)

    def __reduce__(self) -> tuple[Any, ...]:
        # The signer is not sent to other processes.
        return Provenance, (self.kind, self.certificate, self.private_key)

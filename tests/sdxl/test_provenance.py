"""Pictures tell their origin, and whether they were changed later."""

from __future__ import annotations

import io
import itertools
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from sdxl import content_credentials
from sdxl.content_credentials import SOURCE_TYPE, root_certificates
from sdxl.images import Pixels, encode, read_parameters
from sdxl.params import GenerationParams, InvalidParams
from sdxl.picture_files import file_of
from sdxl.provenance import AND_WATERMARK, C2PA, METADATA, OFF, PROVENANCES, Provenance
from serve.render.verification import CHANGED, HOLDS, UNMARKED, UNSIGNED, WATERMARKED, main, verify

RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
IPTC = "http://iptc.org/std/Iptc4xmpExt/2008-02-29/"
FORMATS = ("png", "jpeg", "webp")
PIXELS = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
SMOOTH = np.linspace(40, 200, 128 * 128 * 3).reshape(128, 128, 3).astype(np.uint8)
PARAMS = GenerationParams(prompt="a red circle", seed=7, width=64, height=64).as_dict()


def picture(format: str, provenance: Provenance, pixels: Pixels = PIXELS) -> bytes:
    if provenance.kind.startswith(C2PA):
        pytest.importorskip("c2pa")
    file = encode(provenance.mark(pixels), format, PARAMS, xmp=provenance.xmp)
    return provenance.sign(file, format)


def stored(tmp_path: Path, file: bytes, format: str = "png") -> Path:
    path = tmp_path / f"picture.{format}"
    path.write_bytes(file)
    return path


@pytest.mark.parametrize("format", FORMATS)
def test_the_metadata_name_iptcs_source_type_where_other_programs_look(format: str) -> None:
    file = picture(format, Provenance(METADATA))
    with Image.open(io.BytesIO(file)) as image:
        packet = image.info.get("xmp") or image.info["XML:com.adobe.xmp"]
    (description,) = ElementTree.fromstring(packet).iter(f"{{{RDF}}}Description")
    assert description.get(f"{{{IPTC}}}DigitalSourceType") == SOURCE_TYPE
    assert read_parameters(file)["prompt"] == "a red circle"
    assert file == picture(format, Provenance(METADATA))


@pytest.mark.parametrize("format", FORMATS)
def test_without_provenance_the_file_is_unchanged(format: str) -> None:
    assert picture(format, Provenance(OFF)) == encode(PIXELS, format, PARAMS)


@pytest.mark.parametrize("format", FORMATS)
def test_a_signed_picture_holds_and_keeps_its_pixels_and_parameters(
    tmp_path: Path, format: str
) -> None:
    file = picture(format, Provenance(C2PA))
    verdict = verify(stored(tmp_path, file, format))
    assert (verdict.verdict, verdict.failures) == (HOLDS, ())
    assert verdict.source_type == SOURCE_TYPE and "self-made" in verdict.signer
    assert not verdict.is_trusted and verdict.generator.startswith("sdxl-deepcache")
    assert read_parameters(file)["seed"] == 7
    with (
        Image.open(io.BytesIO(file)) as signed,
        Image.open(io.BytesIO(encode(PIXELS, format, PARAMS))) as plain,
    ):
        assert signed.tobytes() == plain.tobytes()


@pytest.mark.parametrize("format", FORMATS)
def test_a_changed_byte_of_the_picture_is_reported(tmp_path: Path, format: str) -> None:
    plain = len(picture(format, Provenance(METADATA)))
    file = picture(format, Provenance(C2PA))
    draw = random.Random(0)
    manifest = file.index(b"jumb")
    end = manifest + len(file) - plain
    outside = [i for i in range(len(file)) if not manifest - 40 <= i < end + 40]
    for place in draw.sample(outside, 40):
        changed = bytearray(file)
        changed[place] ^= 1 << draw.randrange(8)
        verdict = verify(stored(tmp_path, bytes(changed), format))
        assert verdict.verdict != HOLDS, f"byte {place} of {len(file)}"


def test_unsigned_unmarked_and_resaved_pictures_are_distinguished(tmp_path: Path) -> None:
    with Image.open(io.BytesIO(picture("png", Provenance(C2PA)))) as image:
        resaved = file_of(image)
    assert verify(stored(tmp_path, resaved)).verdict == UNMARKED
    assert verify(stored(tmp_path, picture("png", Provenance(METADATA)))).verdict == UNSIGNED
    assert verify(stored(tmp_path, picture("png", Provenance(OFF)))).verdict == UNMARKED
    assert verify(stored(tmp_path, b"no picture")).verdict == CHANGED


@pytest.mark.parametrize("kind", PROVENANCES)
def test_pixels_are_marked_only_if_requested(kind: str) -> None:
    is_same = np.array_equal(Provenance(kind).mark(PIXELS), PIXELS)
    assert is_same != kind.endswith(AND_WATERMARK)


@pytest.mark.parametrize("format", FORMATS)
def test_a_watermark_is_found_beside_a_manifest_and_after_both_are_gone(
    tmp_path: Path, format: str
) -> None:
    path = stored(tmp_path, picture(format, Provenance(C2PA + AND_WATERMARK), SMOOTH), format)
    signed = verify(path)
    assert (signed.verdict, signed.is_watermarked) == (HOLDS, True)
    assert signed.watermark_chance < 1e-6
    with Image.open(path) as image:
        image.convert("RGB").save(tmp_path / "again.png")
    again = verify(tmp_path / "again.png")
    assert (again.verdict, again.source_type) == (WATERMARKED, SOURCE_TYPE)
    unmarked = verify(stored(tmp_path, picture(format, Provenance(C2PA), SMOOTH), format))
    assert (unmarked.verdict, unmarked.is_watermarked) == (HOLDS, False)


def test_a_manifest_says_that_the_pixels_are_watermarked(tmp_path: Path) -> None:
    c2pa = pytest.importorskip("c2pa")
    for kind, actions in (
        (C2PA, ["c2pa.created"]),
        (C2PA + AND_WATERMARK, ["c2pa.created", "c2pa.watermarked.unbound"]),
    ):
        file = picture("png", Provenance(kind))
        with c2pa.Reader("image/png", io.BytesIO(file)) as reader:
            manifest = json.loads(reader.json())
        (active,) = manifest["manifests"].values()
        (stated,) = (each["data"] for each in active["assertions"] if "actions" in each["label"])
        assert [each["action"] for each in stated["actions"]] == actions


def test_an_operators_certificate_signs_and_its_root_is_trusted(tmp_path: Path) -> None:
    pytest.importorskip("c2pa")
    from sdxl.content_credentials import self_made

    chain, key = self_made()
    (tmp_path / "chain.pem").write_bytes(chain)
    (tmp_path / "key.pem").write_bytes(key)
    (tmp_path / "root.pem").write_bytes(b"caf\xe9\n-----BEGIN" + chain.split(b"-----BEGIN")[-1])
    own = Provenance(C2PA, str(tmp_path / "chain.pem"), str(tmp_path / "key.pem"))
    path = stored(tmp_path, picture("png", own))
    roots = root_certificates((tmp_path / "root.pem").read_bytes(), "root.pem")
    assert verify(path, roots).is_trusted
    for kind, code in ((own, 0), (Provenance(METADATA), 1)):
        path = stored(tmp_path, picture("png", kind))
        assert main([str(path), "--trust", str(tmp_path / "root.pem")]) == code, kind


@pytest.mark.parametrize("content", [b"", b"hello\n", bytes(range(128, 250))])
def test_trusted_roots_are_pem_certificates(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("c2pa")
    path, roots = stored(tmp_path, picture("png", Provenance(METADATA))), tmp_path / "roots.pem"
    roots.write_bytes(content)
    with pytest.raises(InvalidParams, match=r"trust must be a file of PEM certificates, got .*pem"):
        main([str(path), "--trust", str(roots)])


def test_a_key_of_another_certificate_is_refused_before_any_picture(tmp_path: Path) -> None:
    pytest.importorskip("c2pa")
    from sdxl.content_credentials import _new_certificate

    (tmp_path / "chain.pem").write_bytes(_new_certificate()[0])
    (tmp_path / "key.pem").write_bytes(_new_certificate()[1])
    with pytest.raises(InvalidParams, match="certificate"):
        _ = Provenance(C2PA, str(tmp_path / "chain.pem"), str(tmp_path / "key.pem")).sign


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"kind": "watermark"}, "provenance"),
        ({"certificate": "chain.pem"}, "private_key"),
        ({"certificate": "no.pem", "private_key": "no.pem"}, "certificate"),
    ],
)
def test_impossible_choices_are_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        Provenance(**values)
    assert caught.value.field == field


def test_verify_answers_in_words_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(tmp_path, picture("png", Provenance(C2PA)))
    assert main([str(path)]) == 0
    words = capsys.readouterr().out
    assert "holds: the picture is as it was signed" in words
    assert "watermark    not found (score" in words
    assert main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["prompt"] == "a red circle"


@pytest.mark.parametrize(("kind", "code"), [(METADATA, 0), (METADATA + AND_WATERMARK, 0), (OFF, 1)])
def test_an_unsigned_picture_passes_if_it_names_its_origin(
    tmp_path: Path, kind: str, code: int
) -> None:
    assert main([str(stored(tmp_path, picture("png", Provenance(kind), SMOOTH)))]) == code


def test_two_processes_that_start_at_once_share_one_certificate_and_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers, both = itertools.count(), threading.Barrier(2)

    def made() -> tuple[bytes, bytes]:
        number = next(numbers)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return f"certificate {number}".encode(), f"key {number}".encode()

    monkeypatch.setattr(content_credentials, "_new_certificate", made)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(content_credentials.self_made) for _ in range(2)]
    assert {each.result() for each in found} == {(b"certificate 0", b"key 0")}

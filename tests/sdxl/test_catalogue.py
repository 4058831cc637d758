"""Files of adapters are found by name at run time. No other file can be named."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from sdxl.catalogue import Catalogue
from sdxl.params import InvalidParams

FILES = {
    "ink.safetensors": "ink",
    "styles/Pen & paper.safetensors": "styles/Pen & paper",
    "styles/oil/pytorch_lora_weights.safetensors": "styles/oil",
    "wash/adapter_model.safetensors": "wash",
    "pytorch_lora_weights.safetensors": "pytorch_lora_weights",
    "UPPER.SAFETENSORS": "UPPER",
    "styles/embeddings/a.safetensors": "styles/embeddings/a",
}
EMBEDDINGS = {
    "embeddings/neon.safetensors": "neon",
    "embeddings/more/dusk.safetensors": "more/dusk",
    "embeddings/dawn/learned_embeds.safetensors": "dawn",
}
NEON = {"prompt": "a street in neon, at night"}
OTHERS = (
    *("ink.pt", "a:b.safetensors", "a,b.safetensors", "a<b.safetensors", "a\nb.safetensors"),
    *(".hidden.safetensors", ".cache/x.safetensors", f"{'n' * 190}/{'n' * 20}.safetensors"),
    *("embeddings/dawn/learned_embeds_2.safetensors", "embeddings/neon.pt"),
)


def write(folder: Path, *names: str) -> Catalogue:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return Catalogue([folder])


def test_files_are_listed_by_kind_and_name(tmp_path: Path) -> None:
    catalogue = write(tmp_path, *FILES, *EMBEDDINGS, *OTHERS)
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nothing")
    (tmp_path / os.fsdecode(b"\xff.safetensors")).touch()
    found = {
        each.name: each for each in (*catalogue.listed("lora"), *catalogue.listed("embedding"))
    }
    assert {each.name for each in catalogue.listed("lora")} == {*FILES.values()}
    assert {each.name for each in catalogue.listed("embedding")} == {*EMBEDDINGS.values()}
    for file, name in (FILES | EMBEDDINGS).items():
        assert found[name].path == tmp_path / file
        assert found[name].bytes == len(file)


def test_a_name_that_no_request_can_give_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalogue = write(tmp_path, *FILES, *EMBEDDINGS, *OTHERS)
    for kind in ("lora", "embedding", "lora"):
        catalogue.listed(kind)
    expected = (
        f"{str(tmp_path / name)!r} is not listed; rename it: names have at most 200 characters "
        "without : , < >"
        for name in (*OTHERS[1:5], OTHERS[7])
    )
    assert sorted(caplog.messages) == sorted(expected)


def test_files_come_and_go_at_run_time(tmp_path: Path) -> None:
    catalogue = write(tmp_path)
    assert catalogue.listed("lora") == [] and catalogue.embeddings_in(NEON) == []
    write(tmp_path, "ink.safetensors", "embeddings/neon.safetensors")
    assert catalogue.find("lora", "ink").kind == "lora"
    (found,) = catalogue.embeddings_in(NEON)
    assert (found.name, found.kind) == ("neon", "embedding")
    (tmp_path / "ink.safetensors").unlink()
    with pytest.raises(InvalidParams):
        catalogue.find("lora", "ink")


@pytest.mark.parametrize("name", ["ink.safetensors", "wash/adapter_model.safetensors"])
def test_the_digest_is_the_files_and_follows_it(name: str, tmp_path: Path) -> None:
    catalogue = write(tmp_path, name)
    path = tmp_path / name
    before = os.stat(path)
    first = catalogue.listed("lora")[0]
    assert first.sha256 == hashlib.sha256(name.encode()).hexdigest()
    path.write_bytes(name.upper().encode())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert catalogue.listed("lora")[0].sha256 == hashlib.sha256(name.upper().encode()).hexdigest()


def test_the_digest_is_of_the_companion_too(tmp_path: Path) -> None:
    catalogue = write(tmp_path, "wash/adapter_model.safetensors")
    digests = {catalogue.find("lora", "wash").sha256}
    for text in ("4", "8"):
        (tmp_path / "wash/adapter_config.json").write_text(text)
        digests.add(catalogue.find("lora", "wash").sha256)
    assert len(digests) == 3


def test_of_one_name_the_first_folder_wins(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        write(folder, "ink.safetensors", f"{folder.name}.safetensors")
    catalogue = Catalogue([folders[1], tmp_path / "gone", folders[0]])
    assert catalogue.find("lora", "ink").path.parent == folders[1]
    assert [each.name for each in catalogue.listed("lora")] == ["a", "b", "ink"]


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    write(tmp_path / "store", "far.safetensors")
    catalogue = write(tmp_path / "top", "ink.safetensors")
    (tmp_path / "top" / "linked.safetensors").symlink_to(tmp_path / "store/far.safetensors")
    for name, target in {"one": "store", "two": "store", "circle": "top"}.items():
        (tmp_path / "top" / name).symlink_to(tmp_path / target)
    assert [each.name for each in catalogue.listed("lora")] == [
        "ink",
        "linked",
        "one/far",
        "two/far",
    ]


@pytest.mark.parametrize(
    ("name", "near"),
    [("inc", "ink"), ("ink.safetensors", "ink"), ("PEN", "styles/pen"), ("x" * 10_000, "ink")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, near: str, tmp_path: Path) -> None:
    catalogue = write(tmp_path, "ink.safetensors", "styles/pen.safetensors")
    with pytest.raises(InvalidParams, match=rf"^loras must name LoRAs .* such as .*{near}.*, got"):
        catalogue.find("lora", name)


@pytest.mark.parametrize(
    "name", ["../secret", "{}/secret", "top/../../secret", "", ".", "embeddings/neon", "ink\0"]
)
def test_nothing_outside_the_list_can_be_named(name: str, tmp_path: Path) -> None:
    write(tmp_path, "secret.safetensors")
    catalogue = write(tmp_path / "top", "ink.safetensors", "embeddings/neon.safetensors")
    with pytest.raises(InvalidParams):
        catalogue.find("lora", name.format(tmp_path))
    with pytest.raises(InvalidParams):
        catalogue.embeddings_in({"prompt": f"embedding:{name.format(tmp_path)}x"})


def test_embeddings_are_found_in_prompts(tmp_path: Path) -> None:
    names = ("dusk", "styles/dusk", "styles/ink", "styles/deep/Ink")
    catalogue = write(tmp_path, *(f"embeddings/{name}.safetensors" for name in names))

    def found(*texts: str) -> list[str]:
        by_field = dict(zip(("prompt", "negative_prompt"), texts, strict=False))
        return [each.name for each in catalogue.embeddings_in(by_field)]

    assert found("at dusk", "Ink") == ["dusk", "styles/ink"]
    assert found("styles/dusk, styles/deep/ink") == ["styles/dusk", "styles/deep/Ink"]
    write(tmp_path, "embeddings/new/gold.safetensors")
    assert found("gold", "dusk") == ["dusk", "new/gold"]
    os.remove(tmp_path / "embeddings/dusk.safetensors")
    assert found("dusk") == ["styles/dusk"]


def test_a_replaced_embedding_is_read_again(tmp_path: Path) -> None:
    catalogue = write(tmp_path, "embeddings/neon.safetensors")
    old = tmp_path.stat().st_mtime_ns - 10**10
    for place in (tmp_path, tmp_path / "embeddings"):
        os.utime(place, ns=(old, old))
    (before,) = catalogue.embeddings_in(NEON)
    (tmp_path / "embeddings/neon.safetensors").write_bytes(b"other")
    (after,) = catalogue.embeddings_in(NEON)
    assert before != after and after.bytes == len(b"other")

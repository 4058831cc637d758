"""LoRAs and ControlNets of a request: their text forms, tags, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdxl.attachments import Lora, take_tags
from sdxl.controls import Control
from sdxl.params import PARAMETERS, GenerationParams, InvalidParams, Sizes

SIZES = Sizes(default=128, minimum=64, maximum=512)


@pytest.mark.parametrize(
    ("given", "lora"),
    [
        ("a", Lora("a")),
        (" a : 0.8", Lora("a", 0.8)),
        ("a:-1:0", Lora("a", -1.0, 0.0)),
        ({"name": "a/b", "weight": 2}, Lora("a/b", 2.0)),
        ({"name": "a", "text_weight": None}, Lora("a")),
        (Lora("a", 0.5), Lora("a", 0.5)),
    ],
)
def test_an_entry_is_text_or_an_object(given: Any, lora: Lora) -> None:
    assert GenerationParams.from_dict({"loras": [given]}).loras == (lora,)


@pytest.mark.parametrize(
    ("loras", "message"),
    [
        ("a", r"must be a list of NAME\[:WEIGHT\[:TEXT_WEIGHT\]\], got 'a'"),
        ([1], "or of objects with name, weight, text_weight, got 1"),
        ([{"weight": 1}], "or of objects with name"),
        ([{"name": "a", "path": "b"}], "or of objects with name"),
        (["a:x"], "must be a list of NAME"),
        (["a:1:1:1"], "must be a list of NAME"),
        (["a:2.1"], "with 'a': weight must be a number from -2 to 2, got 2.1"),
        (["a:nan"], "with 'a': weight must be a number from -2 to 2, got nan"),
        ([{"name": "a", "weight": True}], "with 'a': weight must be a number"),
        (["a:1:-3"], "with 'a': text_weight must be a number from -2 to 2, got -3"),
        ([{"name": None}], "must have names without : , < >"),
        ([{"name": "a<b"}], "must have names without : , < >, got 'a<b'"),
        ([{"name": "\ud800"}], "name must be valid Unicode"),
        (["a"] * 17, "must have at most 16 entries, got 17"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(loras: Any, message: str) -> None:
    with pytest.raises(InvalidParams, match=f"^loras .*{message}") as error:
        GenerationParams.from_dict({"loras": loras})
    assert error.value.field == "loras"


@pytest.mark.parametrize(
    ("text", "rest", "loras"),
    [
        ("a red ring", "a red ring", []),
        (" 1 < 2 <b>, <i:j> ", " 1 < 2 <b>, <i:j> ", []),
        ("a ring <lora:x>", "a ring", [Lora("x")]),
        ("a <LORA:x:0.8> ring", "a ring", [Lora("x", 0.8)]),
        ("a <lora:x>ring<lora:x> b<lora:x>c", "a ring bc", [Lora("x")] * 3),
        ("<lyco:x y:.5>a", "a", [Lora("x y", 0.5)]),
        # The first number is for the text encoders, as in stable-diffusion-webui.
        ("<lora:x:0.2:1>", "", [Lora("x", 1.0, 0.2)]),
        ("<lora:x:te=0.2>", "", [Lora("x", 0.2)]),
        ("<lora:x:unet=0.2>", "", [Lora("x", 0.2, 1.0)]),
        ("<lora:x:1:te=0:unet=0.2>", "", [Lora("x", 0.2, 0.0)]),
        ("(a ring<lora:x:1>:1.2) <lora:y:-1>", "(a ring:1.2)", [Lora("x"), Lora("y", -1.0)]),
    ],
)
def test_tags_are_taken_out_of_a_prompt(text: str, rest: str, loras: list[Lora]) -> None:
    assert take_tags(text, "prompt") == (rest, loras)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<lora:>", "must name a LoRA as <lora:NAME:WEIGHT> .*, got '<lora:>'"),
        ("a <lora:a:x> b", "must name a LoRA as .*, got '<lora:a:x>'"),
        ("<lora:a:1:1:1>", "must name a LoRA as "),
        ("<lora:a:dyn=4>", "must name a LoRA as "),
        ("a <lora:a:1", "must name a LoRA as .*, got '<lora:a:1'"),
        ("<hypernet:a:1>", "must not name hypernetworks: they are not supported"),
        ("<lora:a:3>", "with 'a': weight must be a number from -2 to 2, got 3"),
        ("<lo<lora:a>ra:b>", "must not have a tag within a tag"),
    ],
)
def test_a_wrong_tag_is_refused_in_its_prompt(text: str, message: str) -> None:
    with pytest.raises(InvalidParams, match=f"^negative_prompt {message}"):
        GenerationParams(negative_prompt=text).resolve(SIZES, lambda: 0)


def test_a_resolved_request_has_each_lora_once_and_no_tag() -> None:
    asked = GenerationParams(
        "a ring <lora:x:0.5>", negative_prompt="<lora:y>", loras=(Lora("x", 1), Lora("z", 1, 0.5))
    )
    resolved = asked.resolve(SIZES, lambda: 0)
    assert (resolved.prompt, resolved.negative_prompt) == ("a ring", None)
    assert resolved.loras == (Lora("x", 1.5), Lora("z", 1.0, 0.5), Lora("y"))
    assert resolved.resolve(SIZES, lambda: 0) == resolved
    twice = GenerationParams(loras=(Lora("x", 1.5), Lora("x", 1.0)))
    with pytest.raises(InvalidParams, match=r"weight must be .* got 2\.5"):
        twice.resolve(SIZES, lambda: 0)


numbers = st.floats(-2, 2)
loras = st.builds(
    Lora,
    name=st.text("abc /.-_é", min_size=1).map(str.strip).filter(bool),
    weight=numbers,
    text_weight=st.none() | numbers,
)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each),
    max_leaves=6,
)
keys = st.sampled_from(["name", "weight", "text_weight"])


@given(st.lists(json_values | st.dictionaries(keys, json_values), max_size=3))
def test_any_other_json_is_refused(loras: list[Any]) -> None:
    try:
        GenerationParams.from_dict({"loras": loras}).resolve(SIZES, lambda: 0)
    except InvalidParams as error:
        assert error.field == "loras" and str(error).encode()


@given(st.text("<>:lora=x1. ", max_size=40))
def test_any_prompt_is_read_or_refused(prompt: str) -> None:
    try:
        rest, loras = take_tags(prompt, "prompt")
    except InvalidParams as error:
        assert error.field == "prompt"
    else:
        assert loras or rest == prompt
        assert take_tags(rest, "prompt") == (rest, [])


@given(loras)
def test_a_tag_gives_the_same_lora(lora: Lora) -> None:
    (read,) = take_tags(lora.tag, "prompt")[1]
    assert (read.name, read.weight, read.in_text) == (lora.name, lora.weight, lora.in_text)


def test_an_empty_list_is_as_none() -> None:
    assert GenerationParams(loras=()).resolve(SIZES, lambda: 0).loras is None


URL = "data:image/png;base64,A="


@pytest.mark.parametrize(
    ("text", "control"),
    [
        ("edges", Control("edges")),
        ("edges=", Control("edges")),
        ("edges=a.png", Control("edges", "a.png")),
        ("edges=a,b:c.png:0.8:0.1-0.6", Control("edges", "a,b:c.png", 0.8, 0.1, 0.6)),
        ("edges=a.png::0-0.6:canny", Control("edges", "a.png", 1, 0, 0.6, preprocess="canny")),
        ("edges:0.5:canny:low=50", Control("edges", "", 0.5, preprocess="canny", low=50)),
        ("u=data:image/png;base64,A=:type=tile", Control("u", URL, type="tile")),
        ("edges=a.png:image=b.png", Control("edges", "a.png:image=b.png")),
    ],
)
def test_a_control_s_text_is_read_from_its_end(text: str, control: Control) -> None:
    assert Control.parse(text) == control
    assert PARAMETERS["controls"].parse(text) == (control,)


@pytest.mark.parametrize("text", ["", "=a.png", "edges:soft", "edges=a.png:low=x", "edges=a:1.2.3"])
def test_a_wrong_text_of_a_control_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be NAME=FILE|invalid literal|could not convert"):
        Control.parse(text)

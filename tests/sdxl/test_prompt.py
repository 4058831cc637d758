"""Prompts to token ids, against transformers' CLIPTokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import CLIPTokenizer

from sdxl.params import InvalidParams
from sdxl.prompt import (
    BODY,
    MAX_CHUNKS,
    Fragment,
    Tokenizer,
    count_tokens,
    embedding_words,
    learned_ids,
    parse,
    tokenize,
)
from sdxl.specs import CHUNK

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
PIECES = (
    *("ring", "<|endoftext|>", "<|StartOfText|>", "<|ENDOFTEXT|>", "|>", "!", "!!", "'s", "'LL"),
    *(" ", "\n\t", "\x00", "\u00a0", "\u200b", "e\u0301", "é", "İ", "ß", "½", "中文"),
    *("\ufb01", "\u0661", "\N{FOX FACE}", "\N{MAN}\u200d\N{WOMAN}"),
)
AWKWARD = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)

Pair = tuple[Tokenizer, CLIPTokenizer]


def load(folder: Path) -> Pair:
    return Tokenizer.from_folder(folder), CLIPTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def pairs(tokenizer_folders: tuple[Path, Path]) -> tuple[Pair, Pair]:
    return load(tokenizer_folders[0]), load(tokenizer_folders[1])


@pytest.fixture(scope="session")
def tokenizer(pairs: tuple[Pair, Pair]) -> Tokenizer:
    return pairs[1][0]


def assert_same(pair: Pair, text: str) -> None:
    ours, theirs = pair
    needed = theirs(text).input_ids
    assert [ours.bos, *ours.encode(text), ours.eos] == needed, repr(text)


@given(text=ANY_TEXT | AWKWARD)
@example(text="a Ring's (red) star!! <|endoftext|> \N{FOX FACE}")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_encodes_as_transformers_does(pairs: tuple[Pair, Pair], text: str) -> None:
    for pair in pairs:
        assert_same(pair, text)


@given(text=AWKWARD)
@settings(max_examples=60, deadline=None)
def test_every_stored_layout_encodes_alike(
    text: str, layouts: dict[str, Pair], pairs: tuple[Pair, Pair]
) -> None:
    for name, pair in layouts.items():
        assert_same(pair, text)
        assert pair[0].pad == pairs[1][0].pad, name


@pytest.fixture(scope="session")
def layouts(
    tokenizer_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Pair]:
    """Save tokenizer_2 as transformers 5 does, or as the published SDXL has it."""
    root = tmp_path_factory.mktemp("layouts")
    CLIPTokenizer.from_pretrained(tokenizer_folders[1]).save_pretrained(root / "saved")
    assert not (root / "saved" / "merges.txt").exists()
    published = root / "published"
    published.mkdir()
    for name in ("vocab.json", "merges.txt"):
        (published / name).write_bytes((tokenizer_folders[1] / name).read_bytes())
    special = json.loads((tokenizer_folders[1] / "special_tokens_map.json").read_text())
    flags = {"lstrip": False, "rstrip": False, "single_word": False}
    tokens = {key: {"content": text, "normalized": True, **flags} for key, text in special.items()}
    (published / "special_tokens_map.json").write_text(json.dumps(tokens | {"pad_token": "!"}))
    vocab = json.loads((published / "vocab.json").read_text())
    listed = {
        str(vocab[text]): {"content": text, "normalized": text != "!", "special": True, **flags}
        for text in ("!", "<|startoftext|>", "<|endoftext|>")
    }
    config = {"added_tokens_decoder": listed, "pad_token": "!", "eos_token": "<|endoftext|>"}
    (published / "tokenizer_config.json").write_text(json.dumps(config))
    return {name: load(root / name) for name in ("saved", "published")}


@pytest.mark.parametrize("text", ["", "a red ring", "ring " * BODY, "star, " * 30, "a \\ b: c 1:2"])
def test_short_prompts_give_exactly_transformers_ids(pairs: tuple[Pair, Pair], text: str) -> None:
    for ours, theirs in pairs:
        needed = theirs(text, padding="max_length", max_length=CHUNK).input_ids
        tokens = tokenize(text, ours)
        assert [list(chunk) for chunk in tokens.ids] == [needed]
        assert tokens.weights == ((1.0,) * CHUNK,)


@given(count=st.integers(1, MAX_CHUNKS * BODY))
@settings(max_examples=40, deadline=None)
def test_no_token_of_a_long_prompt_is_lost(count: int, tokenizer: Tokenizer) -> None:
    text = "ring star the " * (count // 3) + "red " * (count % 3)
    tokens = tokenize(text, tokenizer)
    bodies: list[int] = []
    for chunk in tokens.ids:
        assert len(chunk) == CHUNK and chunk[0] == tokenizer.bos
        bodies += chunk[1 : chunk.index(tokenizer.eos)]
        assert set(chunk[chunk.index(tokenizer.eos) + 1 :]) <= {tokenizer.pad}
    assert bodies == tokenizer.encode(text) and len(tokens.ids) == -(-count // BODY)


def test_one_token_too_many_is_refused_by_field(tokenizer: Tokenizer) -> None:
    tokenize("ring " * (MAX_CHUNKS * BODY), tokenizer)
    with pytest.raises(
        InvalidParams, match=r"negative_prompt must have at most 1200 tokens, got 1201"
    ):
        tokenize("ring " * (MAX_CHUNKS * BODY + 1), tokenizer, "negative_prompt")


@pytest.mark.parametrize(
    ("text", "lengths", "count"),
    [
        ("ring BREAK red star", [1, 2], BODY + 2),
        ("ring\nBREAK\n, star", [1, 2], BODY + 2),
        ("(ring:1.2)BREAK[star]", [1, 1], BODY + 1),
        ("(ring BREAK star:1.2)", [1, 1], BODY + 1),
        ("BREAK ring", [0, 1], BODY + 1),
        ("ring BREAK BREAK star", [1, 0, 1], 2 * BODY + 1),
        ("ring BREAK", [1], BODY),
        ("ring BREAK BREAK", [1, 0], 2 * BODY),
        ("BREAK", [0], BODY),
        ("ring " * BODY + "BREAK star", [BODY, 1], BODY + 1),
        ("ring " * (BODY + 1) + "BREAK star", [BODY, 1, 1], 2 * BODY + 1),
    ],
)
def test_break_ends_a_chunk_as_in_the_webui(
    text: str, lengths: list[int], count: int, tokenizer: Tokenizer
) -> None:
    tokens = tokenize(text, tokenizer)
    assert [chunk.index(tokenizer.eos) - 1 for chunk in tokens.ids] == lengths
    assert count_tokens(text, tokenizer) == count
    if len(lengths) > 1:
        most = (len(lengths) - 1) * BODY
        with pytest.raises(InvalidParams, match=f"at most {most} tokens, got {count}"):
            tokenize(text, tokenizer, most=most)


def test_break_keeps_weights_and_the_first_chunk_alone(tokenizer: Tokenizer) -> None:
    tokens = tokenize("the (red BREAK ring:1.3) star", tokenizer)
    assert tokens.ids == (
        *tokenize("the red", tokenizer).ids,
        *tokenize("ring star", tokenizer).ids,
    )
    assert [row[:4] for row in tokens.weights] == [(1, 1, 1.3, 1), (1, 1.3, 1, 1)]


@pytest.mark.parametrize("text", ["break", "BREAKFAST", "a_BREAK", "BREAKS 2"])
def test_other_words_break_nothing(text: str, tokenizer: Tokenizer) -> None:
    assert tokenize(text, tokenizer).ids == tokenize(text.lower(), tokenizer).ids


def test_padding_appends_chunks_of_an_empty_prompt(tokenizer: Tokenizer) -> None:
    tokens = tokenize("(ring:1.5)", tokenizer)
    padded = tokens.pad_to(3)
    empty = tokenize("", tokenizer)
    assert padded.ids == tokens.ids + empty.ids * 2
    assert padded.weights == tokens.weights + empty.weights * 2
    assert padded.pad_to(2) == padded


def test_weights_lie_on_their_own_tokens_alone(tokenizer: Tokenizer) -> None:
    tokens = tokenize("the (red ring:1.3) on [star]", tokenizer)
    assert tokens.ids == tokenize("the red ring on star", tokenizer).ids
    expected = (1.0, 1.0, 1.3, 1.3, 1.0, 1 / 1.1)
    assert tokens.weights[0] == expected + (1.0,) * (CHUNK - len(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [("", 1.0)]),
        ("()", [("", 1.0)]),
        ("plain text: 3:4, a-b", [("plain text: 3:4, a-b", 1.0)]),
        ("an (important) word", [("an ", 1.0), ("important", 1.1), (" word", 1.0)]),
        ("((a))", [("a", 1.1 * 1.1)]),
        ("[a]", [("a", 1 / 1.1)]),
        ("(a:1.3)", [("a", 1.3)]),
        ("(a: 1.3 )", [("a", 1.3)]),
        ("(a:-.5)", [("a", -0.5)]),
        ("(a (b:2):1.5)", [("a ", 1.5), ("b", 3.0)]),
        ("(unbalanced", [("unbalanced", 1.1)]),
        ("[unbalanced", [("unbalanced", 1 / 1.1)]),
        ("un)balanced]", [("un)balanced]", 1.0)]),
        ("a:1.3)", [("a:1.3)", 1.0)]),
        ("[a:1.3)", [("a:1.3)", 1 / 1.1)]),
        (r"\(literal\) \[too\]", [("(literal) [too]", 1.0)]),
        (r"C:\\ (a\))", [("C:\\ ", 1.0), ("a)", 1.1)]),
        ("back\\slash \\", [("back\\slash \\", 1.0)]),
        ("(a)(b)", [("ab", 1.1)]),
        (
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky)))",
            [
                ("a ", 1.0),
                ("house", 1.3 * 1.1 * 1.1),
                (" ", 1.1),
                ("on", 1.0),
                (" a ", 1.1),
                ("hill", 0.55),
                (", sun, ", 1.1),
                ("sky", 1.1**4),
            ],
        ),
    ],
)
def test_weights_are_read_as_the_webui_reads_them(
    text: str, expected: list[tuple[str, float]]
) -> None:
    found = parse(text)
    assert [f.text for f in found] == [text for text, _ in expected]
    assert [f.weight for f in found] == pytest.approx([weight for _, weight in expected])


@given(text=st.text(alphabet="ab:1.()[]\\ -", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_brackets_parse_or_are_refused_by_name(text: str) -> None:
    try:
        fragments = parse(text)
    except InvalidParams as refusal:
        assert refusal.field == "prompt"
        return
    assert all(isinstance(f, Fragment) and abs(f.weight) <= 10 for f in fragments)
    assert len("".join(f.text for f in fragments)) <= len(text)


@pytest.mark.parametrize(
    "text", ["(a:11)", "(a:-11)", "(" * 25 + "a", "(a:" + "9" * 400 + ")", "(a:1.2.3)", "(a:.)"]
)
def test_absurd_weights_are_refused(text: str) -> None:
    with pytest.raises(
        InvalidParams,
        match=r"negative_prompt must (have weights from -10.0 to 10.0|have a number as weight)",
    ):
        parse(text, "negative_prompt")


@pytest.mark.parametrize("bracket", ["(", "["])
def test_endless_brackets_are_refused_at_once(bracket: str) -> None:
    with pytest.raises(InvalidParams, match="at most 64 open brackets"):
        parse((bracket + "a") * 5000)


def test_a_folder_without_a_vocabulary_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"needs vocab\.json and merges\.txt"):
        Tokenizer.from_folder(tmp_path)


# -- embeddings -------------------------------------------------------------------------------

LEARNED = learned_ids([("dusk", 1), ("bad hands", 3), ("styles/Ink (v2)", 2), ("Dusk-2", 1)])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a ring at dusk", {"dusk"}),
        ("DUSK,<dusk>, embedding:Dusk", {"dusk"}),
        ("(bad hands:1.3) [dusk-2]", {"bad hands", "dusk-2"}),
        ("dusky, adusk, dusk2, bad  hands", set()),
        ("ink \\(v2\\), styles/ink \\(v2\\)", {"ink (v2)", "styles/ink (v2)"}),
        ("d(us)k", set()),
        ("embedding: dusk", {"dusk"}),
        ("", set()),
    ],
)
def test_names_of_embeddings_are_whole_words(text: str, names: set[str]) -> None:
    assert embedding_words(text, LEARNED) == names


@pytest.mark.parametrize("text", ["embedding:none", "(Embedding:dusk3:1.2)"])
def test_an_unknown_embedding_is_refused(text: str) -> None:
    with pytest.raises(InvalidParams, match="^prompt must name embeddings of the model, such as "):
        embedding_words(text, LEARNED)
    with pytest.raises(InvalidParams, match="the model has none"):
        embedding_words(text, ())


def test_an_embedding_stands_for_its_vectors(tokenizer: Tokenizer) -> None:
    def body(text: str) -> list[int]:
        (ids,) = tokenize(text, tokenizer, learned=LEARNED).ids
        return [id for id in ids[1:] if id not in (tokenizer.eos, tokenizer.pad)]

    ring, at = (tokenizer.encode(word) for word in ("ring", "at"))
    assert body("ring at dusk") == [*ring, *at, -1]
    assert body("bad hands, ring") == [-2, -3, -4, *tokenizer.encode(","), *ring]
    assert body("styles/ink \\(v2\\) dusk-2 <dusk>") == [-5, -6, -7, -1]
    assert count_tokens("ring bad hands", tokenizer, LEARNED) == len(ring) + 3


def test_an_embedding_is_not_split_between_chunks(tokenizer: Tokenizer) -> None:
    (ring,) = tokenizer.encode("ring")
    for before in (BODY - 3, BODY - 2):
        text = f"{'ring ' * before}(bad hands:1.5) ring"
        tokens = tokenize(text, tokenizer, learned=LEARNED)
        first, second = tokens.ids
        if before == BODY - 3:
            assert first[1 + before : 1 + BODY] == (-2, -3, -4) and second[1] == ring
            assert tokens.weights[0][before : 2 + BODY] == (1.0, 1.5, 1.5, 1.5, 1.0)
        else:
            assert first[1 + before] == tokenizer.eos and second[1:5] == (-2, -3, -4, ring)
            assert tokens.weights[1][:5] == (1.0, 1.5, 1.5, 1.5, 1.0)

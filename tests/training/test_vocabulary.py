"""The vocabulary: any bytes encode, and each word of the captions is one token."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CLIPTokenizer

from sdxl.mini.scenes import words
from sdxl.single_file.configs import END, START, byte_letters
from sdxl.specs import CHUNK
from training.mini.vocabulary import build_vocabulary, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CLIPTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, END)
    return CLIPTokenizer.from_pretrained(folder)


def test_every_byte_has_its_symbols() -> None:
    vocabulary = build_vocabulary()
    assert len(set(byte_letters())) == 256
    missing = [s for s in byte_letters() if s not in vocabulary or f"{s}</w>" not in vocabulary]
    assert missing == []
    assert vocabulary["!"] == 0, "the second tokenizer pads with id 0"
    assert (vocabulary[START], vocabulary[END]) == (len(vocabulary) - 2, len(vocabulary) - 1)


def test_each_word_of_the_captions_is_one_token(tokenizer: CLIPTokenizer) -> None:
    split = [word for word in words() if len(tokenizer(word).input_ids) != 3]
    assert split == []


@pytest.mark.parametrize("text", ["a red circle", "żółć", "東京 🎨", "x_1 \x07 9", "qzv"])
def test_any_text_comes_back_without_an_unknown_token(tokenizer: CLIPTokenizer, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.eos_token_id) == 1
    back = tokenizer.decode(ids, skip_special_tokens=True)
    assert back.split() == text.lower().split() or back.replace(" ", "") == text.replace(" ", "")


def test_the_two_tokenizers_differ_in_padding_alone(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "1", END)
    write_tokenizer(tmp_path / "2", "!")
    first, second = (CLIPTokenizer.from_pretrained(tmp_path / name) for name in "12")
    a, b = (
        t("a red ring", padding="max_length", truncation=True).input_ids for t in (first, second)
    )
    assert len(a) == len(b) == CHUNK == first.model_max_length
    assert a[:5] == b[:5]
    assert set(a[5:]) == {first.eos_token_id} and set(b[5:]) == {0}

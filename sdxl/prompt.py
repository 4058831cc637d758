"""Tokenizes prompts: CLIP's byte pairs, (weights:1.3), names of embeddings, BREAK, any number of
77-token chunks.

`tokenizers` is imported with the first folder. The ids of text without weights equal
`transformers.CLIPTokenizer`'s. This includes a typed "<|endoftext|>", which becomes the special
token and ends the pooled embedding of this prompt only, and "!", which is the second tokenizer's
padding token.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sdxl.attachments import unknown_name
from sdxl.params import InvalidParams
from sdxl.specs import CHUNK

if TYPE_CHECKING:
    import tokenizers

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
BODY = CHUNK - 2
"""tokens of text in a chunk, between BOS and EOS"""

MAX_CHUNKS = 16
MAX_TOKENS = MAX_CHUNKS * BODY
MAX_WEIGHT = 10.0
MAX_DEPTH = 64
"""The most open brackets of one kind, so that parsing time is linear in the prompt's length."""

ROUND, SQUARE = 1.1, 1 / 1.1
WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d"
    r"|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
EMBEDDING = "embedding:"
"""ComfyUI's prefix of an embedding's name; stable-diffusion-webui has no prefix"""
Learned = Mapping[str, Sequence[int]]
"""the token ids of embeddings, by the words that name them, in lower case"""
Token = str | Mapping[str, Any]
"""a special token in a config: its text, or an object of its text and flags"""

NAMED: Mapping[str, str] = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": EOS}

UNKNOWN = re.compile(rf"{EMBEDDING}([^\s,<>]+)", re.IGNORECASE)
MARKUP = re.compile(
    r"\\[()\[\]\\]"  # an escaped bracket or backslash
    r"|[(\[)\]]"
    r"|:\s*(?P<weight>[+-]?[.\d]+)\s*\)"
    r"|[^\\()\[\]:]+"
    r"|[\\:]"
)
BREAK = re.compile(r"\bBREAK\b")
"""stable-diffusion-webui's word that ends a chunk"""


class Fragment(NamedTuple):
    """A part of a prompt with one weight."""

    text: str
    weight: float


@dataclass(frozen=True)
class Tokens:
    """A prompt's token ids and their weights, [chunks][77] each."""

    ids: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    empty: tuple[int, ...]
    """the chunk of an empty prompt"""

    def pad_to(self, chunks: int) -> Tokens:
        missing = chunks - len(self.ids)
        if missing <= 0:
            return self
        return replace(
            self,
            ids=self.ids + (self.empty,) * missing,
            weights=self.weights + ((1.0,) * CHUNK,) * missing,
        )


class Tokenizer:
    """One of the model's two tokenizers."""

    def __init__(self, backend: tokenizers.Tokenizer, bos: int, eos: int, pad: int) -> None:
        self._backend = backend
        self.bos, self.eos, self.pad = bos, eos, pad

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """Read a folder in transformers' format: vocab.json and merges.txt, or tokenizer.json."""
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read_json(folder / "special_tokens_map.json")
        vocab, merges, listed = _read_vocabulary(folder)
        if "added_tokens_decoder" in config:
            entries = config["added_tokens_decoder"].items()
            listed = [token for _, token in sorted(entries, key=lambda entry: int(entry[0]))]
        named = {key: config.get(key) or default for key, default in NAMED.items()}
        texts = {key: _content(token) for key, token in named.items()}
        for key, text in texts.items():
            if text not in vocab:
                raise ValueError(f"{folder}: {key} {text!r} is not in the vocabulary")
        backend = _build(vocab, merges, texts["unk_token"])
        _add_special_tokens(backend, listed, list(named.values()))
        bos, eos, pad = (vocab[texts[f"{name}_token"]] for name in ("bos", "eos", "pad"))
        return cls(backend, bos, eos, pad)

    def encode(self, text: str) -> list[int]:
        """Return the text's ids without BOS, EOS and padding."""
        return self._backend.encode(text, add_special_tokens=False).ids


def whole_chunks(tokens: int) -> int:
    """Round up to whole chunks."""
    return min(math.ceil(tokens / BODY) * BODY, MAX_TOKENS)


def count_tokens(text: str, tokenizer: Tokenizer, learned: Learned | None = None) -> int:
    """Count the tokens of any text without BOS and EOS, also of text too long to encode. BREAK
    fills a chunk."""
    return _count(_split(text, tokenizer, learned or {}))


def tokenize(
    text: str,
    tokenizer: Tokenizer,
    field: str = "prompt",
    most: int = MAX_TOKENS,
    learned: Learned | None = None,
) -> Tokens:
    """Parse and encode a prompt and split it into chunks; errors name `field`."""
    chunks = _split(text, tokenizer, learned or {}, field)
    if (count := _count(chunks)) > most:
        raise InvalidParams(field, count, f"must have at most {most} tokens")
    if len(chunks) > 1 and not chunks[-1]:
        # BREAK at the end begins no chunk.
        chunks.pop()
    return Tokens(
        ids=tuple(_chunk([id for id, _ in chunk], tokenizer) for chunk in chunks),
        weights=tuple(
            (1.0, *(weight for _, weight in chunk), *[1.0] * (CHUNK - 1 - len(chunk)))
            for chunk in chunks
        ),
        empty=_chunk([], tokenizer),
    )


def _split(
    text: str, tokenizer: Tokenizer, learned: Learned, field: str = "prompt"
) -> list[list[tuple[int, float]]]:
    """Return the tokens of each chunk with their weights."""
    chunks: list[list[tuple[int, float]]] = [[]]
    for fragment in parse(text, field):
        for number, part in enumerate(BREAK.split(fragment.text)):
            if number:
                chunks.append([])
            for ids in _unsplit(part, tokenizer, learned):
                if len(chunks[-1]) + len(ids) > BODY:
                    chunks.append([])
                chunks[-1] += [(id, fragment.weight) for id in ids]
    return chunks


def _count(chunks: Sequence[Sequence[Any]]) -> int:
    return (len(chunks) - 1) * BODY + len(chunks[-1])


def _unsplit(text: str, tokenizer: Tokenizer, learned: Learned) -> Iterator[Sequence[int]]:
    """Yield the ids that must share a chunk: a token, or all vectors of an embedding."""
    start = 0
    for match in _names(tuple(learned)).finditer(text) if learned else ():
        if ids := learned.get(match["name"].lower()):
            yield from ([id] for id in tokenizer.encode(text[start : match.start()]))
            yield ids
            start = match.end()
    yield from ([id] for id in tokenizer.encode(text[start:]))


def learned_ids(vectors: Iterable[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    """Return the token ids -1, -2 and so on for the vectors of embeddings, by the words that name
    the embeddings. `vectors` are the embeddings' names and numbers of vectors."""
    by_word: dict[str, tuple[int, ...]] = {}
    first = 0
    for name, count in vectors:
        ids = tuple(-1 - vector for vector in range(first, first + count))
        for word in words_of(name):
            by_word.setdefault(word, ids)
        first += count
    return by_word


def words_of(name: str) -> tuple[str, str]:
    """Return the words that name an embedding in a prompt: its name with and without folders."""
    return name.lower(), name.lower().rpartition("/")[2]


def embedding_words(text: str, known: Collection[str], field: str = "prompt") -> set[str]:
    """Return the words in a prompt that name embeddings; `known` are all such words. Raise
    InvalidParams for embedding:NAME with an unknown name."""
    if not known and EMBEDDING not in text.lower():
        return set()
    fragments = parse(text, field)
    lower = " ".join(fragment.text for fragment in fragments).lower()
    possible = tuple(word for word in known if word in lower)
    words: set[str] = set()
    for fragment in fragments:
        rest = _names(possible).sub("", fragment.text) if possible else fragment.text
        if unknown := UNKNOWN.search(rest):
            raise unknown_name(field, unknown[1], known, "embeddings")
        if possible:
            words |= {match["name"].lower() for match in _names(possible).finditer(fragment.text)}
    return words & {*known}


@lru_cache
def _names(words: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for names of embeddings: whole words, <NAME> and embedding:NAME."""
    listed = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return re.compile(
        rf"(?:{EMBEDDING}|(?<!\w))(?P<open><)?(?P<name>{listed})(?(open)>|(?!\w))", re.IGNORECASE
    )


def parse(text: str, field: str = "prompt") -> list[Fragment]:
    """Parse the weights of (a), ((a)), (a:1.3) and [a] as stable-diffusion-webui does. An unclosed
    bracket reaches to the end of the prompt. Unopened brackets and \\( \\) \\[ \\] are text. Two
    backslashes make one; a single one is text."""
    pieces: list[list[Any]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def close(bracket: str, weight: float) -> None:
        for piece in pieces[opened[bracket].pop() :]:
            piece[1] *= weight

    for match in MARKUP.finditer(text):
        token, weight = match.group(), match.group("weight")
        if token in opened:
            opened[token].append(len(pieces))
            if len(opened[token]) > MAX_DEPTH:
                raise InvalidParams(
                    field, token * 3 + "…", f"must have at most {MAX_DEPTH} open brackets"
                )
        elif weight is not None and opened["("]:
            close("(", _weight(weight, field))
        elif token == ")" and opened["("]:
            close("(", ROUND)
        elif token == "]" and opened["["]:
            close("[", SQUARE)
        else:
            is_escaped = len(token) == 2 and token[0] == "\\"
            pieces.append([token[1] if is_escaped else token, 1.0])
    for bracket, weight_of in (("(", ROUND), ("[", SQUARE)):
        while opened[bracket]:
            close(bracket, weight_of)
    return list(_merge(pieces, field))


def _weight(text: str, field: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidParams(
            field, f":{text})", "must have a number as weight, as in (word:1.3)"
        ) from None


def _merge(pieces: Sequence[Sequence[Any]], field: str) -> Iterator[Fragment]:
    """Join neighbours with equal weights, so that the tokenizer gets unweighted text as a whole."""
    text, weight = "", 1.0
    for piece, new in pieces:
        if not (math.isfinite(new) and abs(new) <= MAX_WEIGHT):
            raise InvalidParams(field, new, f"must have weights from -{MAX_WEIGHT} to {MAX_WEIGHT}")
        if new != weight and text:
            yield Fragment(text, weight)
            text = ""
        text, weight = text + piece, new
    yield Fragment(text, weight)


def _chunk(body: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    padding = [tokenizer.pad] * (BODY - len(body))
    return (tokenizer.bos, *body, tokenizer.eos, *padding)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _read_vocabulary(
    folder: Path,
) -> tuple[dict[str, int], list[tuple[str, str]], list[dict[str, Any]]]:
    """Return vocabulary, merges, and the special tokens that tokenizer.json lists."""
    from tokenizers.models import BPE

    files = folder / "vocab.json", folder / "merges.txt"
    if all(path.is_file() for path in files):
        try:
            vocab, merges = BPE.read_file(*map(str, files))
        except Exception as error:
            # The library raises no narrower class.
            raise ValueError(f"{folder}: vocab.json or merges.txt is broken ({error})") from error
        return vocab, merges, []
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder}: needs vocab.json and merges.txt, or tokenizer.json")
    stored = _read_json(folder / "tokenizer.json")
    pairs = (m.split(" ") if isinstance(m, str) else m for m in stored["model"]["merges"])
    return stored["model"]["vocab"], [(a, b) for a, b in pairs], stored.get("added_tokens", [])


def _build(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], unknown: str
) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import Regex, models, normalizers, pre_tokenizers

    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=dict(vocab),
            merges=list(merges),
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
            unk_token=unknown,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return backend


def _add_special_tokens(
    backend: tokenizers.Tokenizer, listed: Sequence[Token], named: Sequence[Token]
) -> None:
    """Add special tokens. As in transformers, the flags in `listed` win over those in `named`."""
    from tokenizers import AddedToken

    flags = ("single_word", "lstrip", "rstrip", "normalized")
    names = {_content(token) for token in named}
    tokens: dict[str, AddedToken] = {}
    for token in (*named, *listed):
        text, stored = _content(token), {} if isinstance(token, str) else token
        given = {flag: stored[flag] for flag in flags if flag in stored}
        is_special = text in names or stored.get("special", False)
        tokens[text] = AddedToken(text, special=is_special, **given)
    backend.add_tokens(list(tokens.values()))


def _content(token: Token) -> str:
    return token if isinstance(token, str) else token["content"]

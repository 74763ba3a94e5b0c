"""Where a response ends: the incremental search for stop strings against decoding everything at every token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from vlmrl.data.encode import EncodedPrompt
from vlmrl.errors import EngineError
from vlmrl.rollout.chat import _ended
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.response_end import OPEN_TOKENS, ResponseEnd, ResponseTexts, StopSearch
from vlmrl.rollout.vllm.engine import VllmEngine
from vlmrl.types import Finish, Row, Sample, SamplingParams

EURO = "€".encode()
BYTES = (EURO, "😀".encode(), "é".encode(), EURO[:2], b"\x80", b"\xf0", b"\n")
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = dict(
    zip([*PLAIN, *(b for b in range(256) if b not in PLAIN)], map(chr, [*PLAIN, *range(256, 324)]), strict=True)
)
"""Byte -> the letter that stands for it in a byte-level vocabulary."""


def finish_reason(
    token_ids: Sequence[int], params: SamplingParams, decode: Callable[[Sequence[int]], str]
) -> Finish | None:
    """The rule in its slow form: why a response ends after these tokens, or None if it goes on."""
    if token_ids and token_ids[-1] in params.stop_ids:
        return "stop"
    if params.stop and token_ids and any(s in decode(token_ids) for s in params.stop):
        return "stop"
    return "length" if len(token_ids) >= params.max_new_tokens else None


def first_end(ids: Sequence[int], params: SamplingParams, texts: ResponseTexts) -> tuple[int, Finish] | None:
    """(number of tokens, reason) by the slow rule; None where the tokens do not end a response."""
    for count in range(1, len(ids) + 1):
        if (reason := finish_reason(ids[:count], params, texts)) is not None:
            return count, reason
    return None


def found_end(ids: Sequence[int], params: SamplingParams, texts: ResponseTexts) -> tuple[int, Finish] | None:
    end = ResponseEnd(params, texts)
    for count, token in enumerate(ids, 1):
        if (reason := end.add(token)) is not None:
            return count, reason
    return None


def wrapped(raw: Tokenizer, **more: object) -> PreTrainedTokenizerFast:
    raw.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|image|>", special=True)])
    raw.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, **{"clean_up_tokenization_spaces": False, **more})


def of_bytes() -> PreTrainedTokenizerFast:
    """Byte-level BPE: single bytes, words, and tokens that begin or end within a character."""
    pieces = [bytes([b]) for b in range(256)]
    pieces += [
        b" no",
        b"no",
        b"</",
        b"answer",
        b">",
        b"\n\n",
        b" \xe2",
        b"\x82\xac",
        b"\xac \xf0\x9f",
        EURO,
        b"a" + EURO[:1],
    ]
    vocabulary = {"".join(LETTERS[b] for b in piece): i for i, piece in enumerate(dict.fromkeys(pieces))}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.decoder = decoders.ByteLevel()
    return wrapped(raw)


def of_pieces(*, strips: bool) -> PreTrainedTokenizerFast:
    """Sentencepiece: a space is ▁, unknown characters are single bytes. `strips`: a first space is left out."""
    words = [
        "▁",
        "▁▁",
        "▁no",
        "no",
        "▁yes",
        "</",
        "answer",
        ">",
        ".",
        "▁a",
        "e",
        "€",
        "\n",
        "\N{REPLACEMENT CHARACTER}",
    ]
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    raw = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return wrapped(raw)


def of_metaspace() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["▁", "▁no", "no", "▁yes", "▁a", "b", "</", ">"])}))
    raw.decoder = decoders.Metaspace()
    return wrapped(raw)


def of_word_pieces(*, cleans: bool) -> PreTrainedTokenizerFast:
    words = ["no", "##no", "yes", ".", ",", "'", "n't", "do", "##s", "'s", "!", "a", "##b"]
    raw = Tokenizer(models.WordPiece({w: i for i, w in enumerate(["[UNK]", *words])}))
    raw.decoder = decoders.WordPiece(cleanup=False)
    return wrapped(raw, clean_up_tokenization_spaces=cleans)


def of_suffixes() -> PreTrainedTokenizerFast:
    words = ["no</w>", "no", "yes</w>", "a", "b</w>", ".</w>"]
    raw = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], end_of_word_suffix="</w>"))
    raw.decoder = decoders.BPEDecoder("</w>")
    return wrapped(raw)


class InPython:
    """A tokenizer whose text changes as a whole with each token: only decoding everything is right."""

    is_fast = False
    words = ("no", " yes", "<", "answer", ">")

    def __len__(self) -> int:
        return len(self.words)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(reversed([self.words[i] for i in ids]))


KINDS = {
    "bytes": of_bytes(),
    "pieces": of_pieces(strips=False),
    "pieces, first space left out": of_pieces(strips=True),
    "metaspace": of_metaspace(),
    "word pieces": of_word_pieces(cleans=False),
    "word pieces, cleaned": of_word_pieces(cleans=True),
    "suffixes": of_suffixes(),
    "in Python": InPython(),
}


@st.composite
def tokens(draw: st.DrawFn, kind: str) -> list[int]:
    """Repeated patterns, so that tokens are fixed: words, special tokens, parts of characters, bytes of none."""
    size = len(KINDS[kind])
    # The last tokens are the words and the special ones; the first may be all bytes.
    # A model may have more ids than its tokenizer.
    token = st.integers(0, size - 1) | st.integers(max(0, size - 20), size if kind != "in Python" else size - 1)
    pattern = st.lists(token, min_size=1, max_size=6)
    if kind == "bytes":
        pattern |= st.sampled_from([list(x) for x in BYTES])
    if kind.startswith("pieces"):
        pattern |= st.sampled_from([[b + 1 for b in x] for x in BYTES])
    parts = draw(st.lists(st.tuples(pattern, st.integers(1, 30)), min_size=1, max_size=5))
    return [i for piece, times in parts for i in piece * times]


def cut_out(text: str, end: int) -> str:
    """The shortest string of at most 40 characters that ends there and nowhere before."""
    for start in range(end - 1, max(-1, end - 41), -1):
        if text.find(text[start:end]) == start:
            return text[start:end]
    return text[max(0, end - 40) : end]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_response_ends_where_decoding_everything_ends_it(kind: str, data: st.DataObject) -> None:
    ids, texts = data.draw(tokens(kind)), ResponseTexts(KINDS[kind])
    text = texts(ids)
    places = data.draw(st.lists(st.integers(1, max(1, len(text))), min_size=1, max_size=4))
    stops = tuple(cut_out(text, end) or "no" for end in places) + data.draw(
        st.sampled_from([(), ("no.",), ("zz", "€ ")])
    )
    for chosen in ((), *((stop,) for stop in stops), stops):
        params = SamplingParams(stop=chosen, stop_ids=(len(KINDS[kind]) - 3,), max_new_tokens=max(1, len(ids) - 2))
        assert found_end(ids, params, texts) == first_end(ids, params, texts), (chosen, text)


def byte_ids(data: bytes) -> list[int]:
    """Tokens of single bytes, in a vocabulary of pieces."""
    return [b + 1 for b in data]


def piece(name: str) -> int:
    return KINDS["pieces"].convert_tokens_to_ids(name)


NO_ID = 10**6
"""An id that only the model has."""
CROSSING = KINDS["bytes"].convert_tokens_to_ids("".join(LETTERS[b] for b in b"\xac \xf0\x9f"))
CASES = {
    "a long run of whole characters, and a word": ("pieces", [*byte_ids(EURO * 90), piece("▁no")], "€ no"),
    "a character with much between its bytes": ("bytes", [*EURO[:2], *[NO_ID] * 90, EURO[2], 97], "€a"),
    "the same, and the next character begins": ("bytes", [*EURO[:2], *[NO_ID] * 90, CROSSING, 97], "€ "),
    "the same in a run of bytes": (
        "pieces",
        [*byte_ids(EURO[:2]), *[NO_ID] * 90, *byte_ids(EURO[2:] + EURO * 12), piece("no")],
        "€no",
    ),
    "the same with special tokens": (
        "pieces",
        [*byte_ids(EURO[:2]), *[piece("<|end|>")] * 90, *byte_ids(EURO[2:] + EURO * 12), piece("no")],
        "€no",
    ),
    "bytes that are no text after some that were": ("pieces", byte_ids(b"\n" * 90 + b"\x80"), "\ufffd" * 80),
    "whole characters among bytes that are no text": (
        "pieces",
        [*byte_ids(b"\x80" * 90 + EURO * 100), piece("no")],
        "€€",
    ),
    "the same and a word after it": ("pieces", [*byte_ids(b"\x80" * 90 + EURO * 100), piece("no"), piece(">")], "no>"),
    "a first space that is left out": ("pieces, first space left out", [piece("▁no")] * 3, " no no no"),
    "spaces alone": ("pieces, first space left out", [*[piece("▁")] * 60, piece("no")], " " * 59 + "no"),
    "a space before a full stop that is taken away": ("word pieces, cleaned", [7] * 30 + [3, 4], "do."),
}


@pytest.mark.parametrize("case", CASES)
def test_hard_cases_end_where_decoding_everything_ends_them(case: str) -> None:
    kind, ids, stop = CASES[case]
    params = SamplingParams(stop=(stop,), max_new_tokens=len(ids) + 1)
    assert found_end(ids, params, ResponseTexts(KINDS[kind])) == first_end(ids, params, ResponseTexts(KINDS[kind]))


PARAMS = SamplingParams(max_new_tokens=3, stop_ids=(9, 8), stop=("END", "fin"))
TEXTS = {1: "E", 2: "ND", 3: "x", 4: "fin", 5: "Endfin.", 8: "", 9: ""}


class Texts(ResponseTexts):
    is_local = False

    def __call__(self, ids: Sequence[int]) -> str:
        return "".join(TEXTS[i] for i in ids)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((), None),
        ((3,), None),
        ((3, 9), "stop"),  # an end token
        ((3, 8), "stop"),  # any of them
        ((1, 2), "stop"),  # a stop string over two tokens
        ((4,), "stop"),
        ((5,), "stop"),  # its token says more
        ((1, 3), None),
        ((3, 3, 3), "length"),
        ((3, 3, 9), "stop"),  # the end token at the limit wins
        ((3, 1, 2), "stop"),  # the stop string at the limit wins
    ],
)
def test_finish_reasons(ids: tuple[int, ...], expected: Finish | None) -> None:
    end = ResponseEnd(PARAMS, Texts(None))
    assert [end.add(i) for i in ids] == [*[None] * (len(ids) - 1), expected][-len(ids) :] * bool(ids)
    assert finish_reason(ids, PARAMS, Texts(None)) == expected


class Counting(ResponseTexts):
    """Counts the tokens that are decoded."""

    decoded = 0

    def __call__(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return super().__call__(ids)


def test_without_stop_strings_nothing_is_decoded() -> None:
    texts = Counting(KINDS["bytes"])
    end = ResponseEnd(replace(PARAMS, stop=(), max_new_tokens=100), texts)
    assert {end.add(5) for _ in range(50)} == {None} and texts.decoded == 0


def chars(text: str) -> list[int]:
    """Tokens of single bytes, in the byte-level vocabulary."""
    return list(text.encode())


@pytest.mark.parametrize(
    ("text", "finish", "stops", "expected"),
    [
        ("so yes and no", "length", ("no", "yes"), ("so yes", "stop")),  # the first to end
        ("so yes and no", "stop", ("yes and", "es"), ("so yes", "stop")),  # it lies within another
        ("abab", "length", ("bab", "ba"), ("aba", "stop")),  # they overlap
        ("so yes", "length", ("yes",), ("so yes", "stop")),  # the limit is reached with it
        ("so ye", "length", ("yes",), ("so ye", "length")),
        ("so ye", "stop", (), ("so ye", "stop")),
    ],
)
def test_an_endpoints_response_ends_where_an_engine_ends_it(text, finish, stops, expected) -> None:
    assert _ended(text, finish, stops) == expected
    texts, ids = ResponseTexts(KINDS["bytes"]), chars(text)
    params = SamplingParams(stop=stops, max_new_tokens=len(ids) if finish == "length" else 100)
    assert (found_end(ids, params, texts) or (len(text), finish)) == (len(expected[0]), expected[1])


def test_tokens_that_vllm_generated_after_the_end_are_left_out() -> None:
    """vLLM's own search for stop strings may be later; it may not be earlier."""
    texts, ids = ResponseTexts(KINDS["bytes"]), chars("so yes and no")
    engine = SimpleNamespace(_texts=texts, version=3)
    output = SimpleNamespace(token_ids=ids, logprobs=[{i: SimpleNamespace(logprob=-i / 10)} for i in ids])
    params = SamplingParams(stop=("es",), max_new_tokens=len(ids))
    sample = VllmEngine._sample(engine, output, params, SimpleNamespace(), 5)  # type: ignore[arg-type]
    assert sample == Sample(tuple(ids[:6]), "so yes", tuple(-i / 10 for i in ids[:6]), "stop", 3, 5)
    params, request = (
        replace(params, max_new_tokens=100, stop=("zz",)),
        SamplingRequest(EncodedPrompt(Row("1", "rows", "", {}), "", (), (), {}, 0, 0, ()), 1, 5),
    )
    output.finish_reason = "stop"
    with pytest.raises(EngineError, match="ended a response after 13 tokens"):
        VllmEngine._sample(engine, output, params, request, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "pattern", "most"),
    [
        *((kind, None, 2 * OPEN_TOKENS) for kind in KINDS if kind != "in Python"),
        ("pieces", byte_ids(EURO), 2 * OPEN_TOKENS),
        ("pieces", byte_ids(b"\n"), 2 * OPEN_TOKENS),
        ("bytes", b"\xff", 8 * OPEN_TOKENS),
        ("pieces", byte_ids(b"\xff"), 8 * OPEN_TOKENS),
        ("pieces", byte_ids(EURO * 90 + b"\xff"), 8 * OPEN_TOKENS),
    ],
)
def test_the_work_per_token_does_not_grow_with_the_response(
    kind: str, pattern: Sequence[int] | None, most: int
) -> None:
    """Words, special tokens, long runs of bytes: at most so many tokens are decoded per token, however long it is."""
    texts, rng = Counting(KINDS[kind]), random.Random(0)
    size = len(KINDS[kind])
    words = list(pattern or rng.choices(range(max(0, size - 20), size), k=50))
    search = StopSearch(("</answer> never", "\N{SNOWMAN}"), texts)
    number = 3000
    assert not any(search.add(words[i % len(words)]) for i in range(number))
    assert texts.decoded < most * number

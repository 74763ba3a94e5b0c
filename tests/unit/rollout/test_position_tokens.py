"""Box tokens in responses: they reach the reward, other special tokens do not, and other texts are as before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from vlmrl.data.encode import EncodedPrompt
from vlmrl.rewards.boxes.planes import Plane
from vlmrl.rewards.boxes.reading import read_boxes
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.response_end import ResponseTexts
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.rollout.vllm.engine import VllmEngine
from vlmrl.types import Row, SamplingParams

WORDS = ["(", ")", ",", "1", "2", "30", "40", "a", "cat", "▁the", "▁"]
SPECIAL = ["<|im_end|>", "<|endoftext|>", "<|box_start|>", "<|box_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
LOCS = [f"<loc{number:04d}>" for number in (1, 2, 30, 1023)]
KEPT = {*SPECIAL[2:], *LOCS}


def tokenizer(*, speaks: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer in which the tokens of positions are special. `speaks`: whether it has any."""
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    raw.add_special_tokens([AddedToken(name, special=True) for name in (SPECIAL + LOCS if speaks else SPECIAL[:2])])
    raw.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False)


def ids_of(own: PreTrainedTokenizerFast, *words: str) -> list[int]:
    return [own.get_vocab()[word] for word in words]


BOX = (
    *("<|object_ref_start|>", "▁the", "cat", "<|object_ref_end|>", "<|box_start|>"),
    *("(", "1", ",", "2", ")", ",", "(", "30", ",", "40", ")", "<|box_end|>", "<|im_end|>"),
)
TEXT = "<|object_ref_start|> thecat<|object_ref_end|><|box_start|>(1,2),(30,40)<|box_end|>"


def test_box_tokens_stay_in_a_response_and_its_end_token_does_not() -> None:
    own = tokenizer()
    texts = ResponseTexts(own)
    assert texts.response(ids_of(own, *BOX)) == TEXT
    assert texts(ids_of(own, *BOX)) == " thecat(1,2),(30,40)"  # as stop strings are searched, and as before
    (read,) = read_boxes(TEXT, Plane("thousand", 1000, 1000)).shapes
    assert (tuple(read.shape), read.label) == ((1, 2, 30, 40), "thecat")


def test_loc_tokens_that_are_special_reach_the_reader() -> None:
    own = tokenizer()
    text = ResponseTexts(own).response(ids_of(own, *LOCS, "▁", "cat", "<|endoftext|>"))
    assert text == "<loc0001><loc0002><loc0030><loc1023> cat"
    (read,) = read_boxes(text, Plane("loc", 1024, 1024)).shapes
    assert tuple(read.shape) == (2, 1, 1023, 30)


@given(st.lists(st.sampled_from([*WORDS, *SPECIAL, *LOCS, "<tool>"]), max_size=12), st.booleans())
def test_other_texts_are_those_of_the_tokenizer(words: list[str], speaks: bool) -> None:
    own = tokenizer(speaks=speaks)
    texts = ResponseTexts(own)
    present = [word for word in words if speaks or word not in KEPT]
    ids = ids_of(own, *present)
    if not KEPT & set(present):
        assert texts.response(ids) == own.decode(ids, skip_special_tokens=True)
    else:
        removed = set(SPECIAL) - KEPT
        expected = "".join(" " * (word[0] == "▁") + word.lstrip("▁") for word in present if word not in removed)
        assert texts.response(ids) == expected


@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_both_engines_keep_them(engine: str) -> None:
    own = tokenizer()
    ids, texts = ids_of(own, *BOX), ResponseTexts(own)
    params = SamplingParams(max_new_tokens=50, stop_ids=(ids[-1],))
    if engine == "vllm":
        output = SimpleNamespace(token_ids=ids, logprobs=[{i: SimpleNamespace(logprob=-0.5)} for i in ids])
        request = SamplingRequest(EncodedPrompt(Row("1", "rows", "", {}), "", (), (), {}, 0, 0, ()), 1, 5)
        sample = VllmEngine._sample(SimpleNamespace(_texts=texts, version=0), output, params, request, 5)  # type: ignore[arg-type]
    else:
        running = SimpleNamespace(ids=ids, logp=[-0.5] * len(ids), seed=5)
        sample = TorchEngine._finished(SimpleNamespace(_texts=texts, version=0), running, "stop")  # type: ignore[arg-type]
    assert (sample.text, sample.token_ids, sample.finish) == (TEXT, tuple(ids), "stop")

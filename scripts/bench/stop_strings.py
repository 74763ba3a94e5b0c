"""How much the search for stop strings costs: it must not decode the whole response again with every token.

    python scripts/bench/stop_strings.py [--tokens 8500] [--repeats 3] [--json] [--smoke]

One response of that many tokens, whose stop string ends with its last token, under a byte-level tokenizer. Printed: the
seconds of CPU of the search that engines use, and of the plain one, which decodes everything at every token; and how
much dearer a token becomes if the response is four times as long, for both. `holds`: both end the response at the same
token, the engines' search is at least 20 times as fast, and its tokens become at most 1.5 times as dear.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vlmrl.rollout.response_end import ResponseTexts, StopSearch

LEAST_RATIO = 20.0
"""Times that the engines' search must be faster than the plain one."""
MOST_GROWTH = 1.5
"""Largest ratio of the seconds per token of two lengths, of the engines' search."""
WORDS = ("the", "angle", "is", "equal", "to", "so", "we", "have", "sides", "and", ".", "12", "€", "<", "/", "answer")
STOP = "</answer>"


def response(number: int, seed: int) -> tuple[ResponseTexts, list[int]]:
    """Return the texts of a tokenizer of words and bytes, and tokens that end with the stop string's last one."""
    words = {f"Ġ{word}": i for i, word in enumerate(WORDS[:12])}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(words | {letter: len(words) + i for i, letter in enumerate(letters)}, []))
    raw.decoder = decoders.ByteLevel()
    rng = random.Random(seed)
    end = [raw.token_to_id(letter) for letter in STOP]
    others = [i for i in range(raw.get_vocab_size()) if i != end[-1]]
    ids = rng.choices(others, weights=[20 if i < len(words) else 1 for i in others], k=number - len(end))
    texts = ResponseTexts(PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False))
    return texts, ids + end


def search(texts: ResponseTexts, ids: Sequence[int]) -> int:
    """Return the number of tokens with which the response ends, as the engines find it."""
    finder = StopSearch((STOP,), texts)
    return next(count for count, token in enumerate(ids, 1) if finder.add(token))


def search_plainly(texts: ResponseTexts, ids: Sequence[int]) -> int:
    """Return the same by decoding everything at every token."""
    return next(count for count in range(1, len(ids) + 1) if STOP in texts(ids[:count]))


def seconds(function: Callable[..., int], number: int, repeats: int) -> float:
    """Return the fewest seconds of CPU of several runs, each with another response of that many tokens."""
    durations = []
    for seed in range(repeats):
        texts, ids = response(number, seed)
        start = time.process_time()
        end = function(texts, ids)
        durations.append(time.process_time() - start)
        assert end == number
    return min(durations)


def measure(number: int, repeats: int) -> Mapping[str, Any]:
    fast, fast_short = (seconds(search, n, repeats) for n in (number, number // 4))
    plain, plain_short = (seconds(search_plainly, n, 1) for n in (number, number // 4))
    return {
        "tokens": number,
        "seconds": round(fast, 4),
        "seconds_plain": round(plain, 4),
        "ratio": round(plain / fast, 1),
        "growth": round(fast / fast_short / 4, 2),
        "growth_plain": round(plain / plain_short / 4, 2),
        "holds": plain >= LEAST_RATIO * fast and fast <= 4 * MOST_GROWTH * fast_short,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8500, help="length of the response")
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the fastest counts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    args = parser.parse_args()
    if args.smoke:
        args.tokens, args.repeats = 200, 1
    figures = measure(args.tokens, args.repeats)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:16} {value}")
    return 0 if figures["holds"] or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())

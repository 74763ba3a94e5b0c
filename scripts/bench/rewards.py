"""Rewards a second on one core: from an input row to parts, value and note, by the path that training uses.

    python scripts/bench/rewards.py [--rows 20000] [--repeats 7] [--smoke]

A row is a response of 1,000 characters to a fungi pair, and its typed truth. Printed: the median over the repeats, by
the CPU clock of this process, for the default reward and for the published one (profile `taxonrl`): with the names of
six genera, with names that no other row has, and for responses that break the format.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.rewards.scoring import Scorer
from vlmrl.tasks.builtin_rewards import load_reward
from vlmrl.types import RewardInput

CHARS = 1000
GENERA = {
    "Boletus": ("Boletaceae", "Boletales"),
    "Suillus": ("Suillaceae", "Boletales"),
    "Amanita": ("Amanitaceae", "Agaricales"),
    "Russula": ("Russulaceae", "Russulales"),
    "Mycena": ("Mycenaceae", "Agaricales"),
    "Lactarius": ("Russulaceae", "Russulales"),
}
REWARDS = {
    "default": ("taxonomy", {"levels": ["order", "family", "genus"], "levels_decide": "different"}),
    "taxonrl": ("taxonrl", {"function": "lfw_fungi_im:compute_score_gemini", "layout": "fungi"}),
}


def make_rows(count: int, *, distinct: bool, broken: bool = False) -> list[dict[str, Any]]:
    """Rows with `response` and `truth`; `distinct`: each has names that no other row has."""
    rng = random.Random(0)
    rows = []
    for i in range(count):
        genera = rng.choices(list(GENERA), k=2)
        suffix = "".join(chr(ord("a") + i // 26**digit % 26) for digit in range(4)) if distinct else ""
        places = [(GENERA[genus][1], GENERA[genus][0] + suffix, genus + suffix) for genus in genera]
        names = dict(zip(("order", "family", "genus"), map(list, zip(*places, strict=True)), strict=True))
        same = genera[0] == genera[1]
        truth = {"same": same, **names, "species": [name + " sp." for name in names["genus"]]}
        tags = ""
        for level, pair in names.items():
            tags += f"\n<{level}>{pair[0]}; {pair[1]}</{level}>"
            if pair[0] != pair[1]:
                break
        end = f"{tags}\n</think>\n<answer>{0.9 if same else 0.1:.4f}</answer>"
        text = "<think>" + ("The cap of specimen 1 is broad, brown and smooth; its pores are white. " * 20)
        response = text[: CHARS - len(end)] + (end.replace("</think>", "") if broken else end)
        rows.append({"response": response, "truth": truth})
    return rows


def rewards_per_second(scorer: Scorer, rows: Sequence[Mapping[str, Any]]) -> float:
    """Of one pass over the rows."""
    start = time.process_time()
    scores = scorer.score([RewardInput(row["response"], row["truth"]) for row in rows])
    seconds = time.process_time() - start
    assert len(scores) == len(rows) and not any(score.error for score in scores)
    return len(rows) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--smoke", action="store_true", help="a toy size in seconds, to see that it runs; its figures mean nothing"
    )
    args = parser.parse_args()
    if args.smoke:
        args.rows, args.repeats = 20, 1
    kinds = {
        "six genera": make_rows(args.rows, distinct=False),
        "distinct names": make_rows(args.rows, distinct=True),
        "broken format": make_rows(args.rows, distinct=False, broken=True),
    }
    for name, (reward, reward_args) in REWARDS.items():
        for kind, rows in kinds.items():
            with Scorer(load_reward(reward, args=reward_args)) as scorer:
                rates = [rewards_per_second(scorer, rows) for _ in range(args.repeats)]
            print(f"{name:8} {kind:16} {statistics.median(rates):9,.0f} rewards/s   best {max(rates):9,.0f}")


if __name__ == "__main__":
    main()

"""Browser for pages of a model: does a page reach anything, how many are scored in a minute, and does it grow?

    python scripts/bench/pages.py [--json] [--smoke]

`attacks`: number of pages of tests/page_attacks.py that were tried. `reached`: messages that reached a server of this
machine. `harmed`: attacks that took longer than their limit and a second, or changed how a plain page looks.
`pages_per_min`: drawn pages that two workers score in a minute with the reward `page`, the truth's picture included.
`growth_mb`: how much the memory of the browser's processes grew from the 100th to the last of 500 pages. `holds`:
nothing reached or harmed, at least 200 pages a minute, less than 32 MiB of growth.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from page_attacks import attack, ears, pages

from vlmrl.browser.client import Browser, BrowserServer
from vlmrl.process import descendants, private_memory
from vlmrl.tasks.page.drawn import LAYOUTS, draw_page
from vlmrl.tasks.page.grader import make_grader
from vlmrl.types import RewardInput

SECONDS, LEAST_PAGES, MOST_GROWTH = 5.0, 200.0, 32.0


def attacks(smoke: bool) -> dict[str, Any]:
    """Try all attacks. `smoke`: a tenth of them."""
    harmed = list[str]()
    with BrowserServer(alone=True) as server, Browser(server.address, seconds=SECONDS) as browser, ears() as listening:
        texts = pages(listening.url, listening.udp)
        names = list(texts)[:: 10 if smoke else 1]
        for name in names:
            outcome = attack(browser, texts[name])
            if not outcome.unharmed or outcome.seconds > SECONDS + 1:
                harmed.append(f"{name}: {outcome}")
        reached = listening.heard()
        layers = browser.facts["layers"]
    return {"attacks": len(names), "reached": len(reached), "harmed": harmed, "layers": layers}


def memory_mb() -> float:
    """Return the main memory of this process's descendants, without files."""
    return private_memory(descendants(os.getpid())) / 2**20


def growth(count: int) -> float:
    """Return the growth of the browser's memory while it draws pages, in MiB."""
    with BrowserServer(alone=True) as server, Browser(server.address) as browser:
        begin = 0.0
        for number in range(count):
            browser.look(drawn(number), 448, 448)
            if number == count // 5:
                begin = memory_mb()
        return memory_mb() - begin


def scored(seeds: list[int]) -> float:
    """Score drawn pages, each beside another one; return the seconds without the start."""
    grade = make_grader(pictures=False)
    inputs = [page_input(seed) for seed in seeds]
    grade(inputs[0])
    begin = time.monotonic()
    for x in inputs:
        grade(x)
    return time.monotonic() - begin


def page_input(seed: int) -> RewardInput:
    """Return a truth, and a response that is another page."""
    truth, response = drawn(seed), drawn(seed + 100_000)
    return RewardInput(f"```html\n{response}\n```", {"html": truth, "width": 448, "height": 448})


def drawn(number: int) -> str:
    """Return the code of a drawn page."""
    return draw_page(LAYOUTS[number % len(LAYOUTS)], number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    count = 8 if options.smoke else 200
    result = attacks(options.smoke)
    with ProcessPoolExecutor(2) as pool:
        seconds = max(pool.map(scored, [list(range(count)), list(range(count, 2 * count))]))
    result["pages_per_min"] = round(2 * count / seconds * 60)
    result["growth_mb"] = round(growth(20 if options.smoke else 500), 1)
    is_fast = options.smoke or (result["pages_per_min"] >= LEAST_PAGES and result["growth_mb"] < MOST_GROWTH)
    result["holds"] = not result["reached"] and not result["harmed"] and is_fast
    print(json.dumps(result) if options.json else "\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()

"""The renderer of SVG code under attack: time, memory, files, connections, and what may be seen.

    python scripts/bench/svg_attacks.py [--json] [--smoke] [--only WORD] [--drawer cairosvg]

The attacks are in tests/svg_attacks*.py. Most were written by somebody who had not seen the renderer. Each is drawn
at 256 x 256 by a process as rewards use it: by vlmrl's own painter, and by cairosvg as for the profile `vfig`, where
only the machine counts, not what is seen. Files with a tell-tale colour are planted; a server listens on loopback.

It holds if each attack ends within 10 s of processor time by itself (counted work refuses it, not a clock), no process
takes more than 512 MB above its start, no connection comes, nothing of a `refused` attack is seen, each `drawn` one is
drawn, and the renderer draws a plain figure after each. `holds`: all of that; else the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2] / "tests")]

from svg_attack_parts import SvgAttack, svg  # noqa: E402
from svg_attack_table import ATTACKS  # noqa: E402
from svg_attacks_reach import plant, planted  # noqa: E402

from vlmrl.svg.draw import Drawer, Drawing, DrawJob  # noqa: E402
from vlmrl.svg.renderer import SvgRenderer  # noqa: E402
from vlmrl.untrusted import CodeRefused  # noqa: E402

SIZE = (256, 256)
MOST_SECONDS, MOST_MB = 10, 512
OWN_WAYS = ("hidden", "odd")
"""Kinds of attacks on what may be seen, not on the machine."""
NEAR = 60
"""Largest distance of a channel at which a pixel still has a colour."""
PLAIN = svg('<rect width="100" height="100" fill="#008000"/><text x="5" y="50" fill="#008000">a figure</text>')


def peak_mb(pid: int) -> float:
    """Return the largest resident memory of a process so far, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Watch(threading.Thread):
    """Thread that notes the peak of memory of the renderer's process, also of one that is killed."""

    def __init__(self, renderer: SvgRenderer) -> None:
        super().__init__(daemon=True)
        self.renderer, self.peaks, self.stop = renderer, dict[int, float](), threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.005):
            self.look()

    def look(self) -> None:
        for pid in self.renderer.pids():
            try:
                self.peaks[pid] = peak_mb(pid)
            except OSError:
                continue


def has(pixels: np.ndarray, colour: str) -> np.ndarray:
    """Return which pixels have a colour, nearly."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return (np.abs(pixels.astype(int) - wanted) <= NEAR).all(axis=-1)


def fault_of(attack: SvgAttack, result: Drawing | CodeRefused, seconds: float, growth: float) -> str:
    """Return what is wrong with the outcome of an attack; "" for nothing."""
    if seconds > MOST_SECONDS:
        return f"{seconds:.1f} s"
    if growth > MOST_MB:
        return f"{growth:.0f} MB"
    if attack.expect == "refused" and isinstance(result, Drawing) and has(result.pixels, "#ff00ff").any():
        return "the payload is seen"
    if attack.expect == "drawn":
        if isinstance(result, CodeRefused):
            return f"refused: {result.reason}"
        if not has(result.pixels[128, 128], "#008000"):
            return "the mark is not drawn"
    return ""


def attacked(drawer: Drawer, only: str, step: int, say: Callable[..., None]) -> dict[str, Any]:
    """Return what the attacks did to one drawer. `only`: word in their names; `step`: every which of them."""
    connections = 0
    with tempfile.TemporaryDirectory() as text, socket.create_server(("127.0.0.1", 0)) as server:
        folder = Path(text)
        plant(folder)
        server.settimeout(0)
        chosen = [a for a in (*ATTACKS, *planted(folder, server.getsockname()[1])) if only in a.name]
        if drawer == "cairosvg":  # what is seen of those is its own way of drawing
            chosen = [attack._replace(expect="either") if attack.kind in OWN_WAYS else attack for attack in chosen]
        chosen = chosen[::step]
        wrong: dict[str, str] = {}
        slowest, largest = (0.0, ""), (0.0, "")
        refused: Counter[str] = Counter()
        with SvgRenderer(1, drawer=drawer) as renderer:
            watch = Watch(renderer)
            watch.start()
            for attack in chosen:
                renderer.draw([DrawJob(PLAIN, SIZE)])
                watch.look()
                (before,) = (watch.peaks[worker.pid] for worker in renderer._workers)
                watch.peaks.clear()
                pid = renderer._workers[0].pid
                begin = processor_seconds(pid)
                (result,) = renderer.draw([DrawJob(attack.svg, SIZE)])
                is_ended = renderer._workers[0].pid != pid
                seconds = float("inf") if is_ended else processor_seconds(pid) - begin
                watch.look()
                growth = max(watch.peaks.values(), default=before) - before
                fault = fault_of(attack, result, seconds, growth)
                (after,) = renderer.draw([DrawJob(PLAIN, SIZE)])
                if not fault and (isinstance(after, CodeRefused) or not has(after.pixels, "#008000").all()):
                    fault = "a plain figure is not drawn after it"
                if fault:
                    wrong[attack.name] = fault
                    say(f"WRONG {attack.name}: {fault}")
                if isinstance(result, CodeRefused):
                    refused[result.kind] += 1
                slowest, largest = max(slowest, (seconds, attack.name)), max(largest, (growth, attack.name))
            watch.stop.set()
        while True:
            try:
                server.accept()[0].close()
                connections += 1
            except OSError:
                break
    return {
        "attacks": len(chosen),
        "by_kind": dict(Counter(attack.kind for attack in chosen)),
        "refused": dict(refused),
        "slowest": [round(slowest[0], 2), slowest[1]],
        "largest_mb": [round(largest[0]), largest[1]],
        "connections": connections,
        "wrong": wrong,
        "holds": not wrong and not connections,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    parser.add_argument("--smoke", action="store_true", help="every fortieth attack")
    parser.add_argument("--only", default="", help="attacks whose name has this word")
    parser.add_argument("--drawer", choices=get_args(Drawer), help="one drawer alone; cairosvg draws for `vfig`")
    options = parser.parse_args()
    say = (lambda *words: None) if options.json else (lambda *words: print(*words, flush=True))
    drawers = [options.drawer] if options.drawer else get_args(Drawer)
    facts: dict[str, Any] = {
        drawer: attacked(drawer, options.only, 40 if options.smoke else 1, say) for drawer in drawers
    }
    facts["holds"] = all(fact["holds"] for fact in facts.values())
    print(json.dumps(facts) if options.json else json.dumps(facts, indent=1))
    sys.exit(0 if facts["holds"] else 1)


if __name__ == "__main__":
    main()

"""The visual judge under load and under faults: speed, answers that lie, a budget, a restart, a server that dies.

    python scripts/bench/judge_drill.py [--provider vllm|gemini] [--calls 512] [--concurrency 32] [--seconds 0.5]
                                        [--processes 2] [--json] [--smoke]

The judge is a server on loopback, in a process of its own, that speaks the protocols of OpenAI and of Gemini. It scores
each picture by its bytes, so every judgement can be checked. Each part is a run of the service that rewards use.

Speed: so many calls, each of which the server answers after `--seconds`. `ratio`: the time, divided by the ideal
(rounds of `--concurrency` calls times `--seconds`). It holds up to 1.3.

Faults: each kind of fault in a third of the calls: late answers, HTTP 429 with Retry-After, HTTP 500, half a body,
numbers that are NaN or 9.0, another schema, prose, an argument, no choices. It holds if each request gets the judgement
of its picture: none is lost, and none is 0 for a fault.

Budget: processes with the same file ask for more judgements than `max_calls` allows. It holds if the server gets
exactly that many calls, and all processes agree on the judgements.

Restart: the same requests again. It holds if all come from the file, without a call.

Outage: the server is killed in the middle, and starts again after `--down` seconds. It holds if no request is without
its judgement, and if at most two calls a second reach for the dead server once its failure is known.

`holds`: all parts hold; else the exit code is 1. With `--smoke` the speed is not judged.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2] / "tests")]

from judge_server import AXES, Asked, honest, judgement_text, pair, picture, refuse, say, score_of, serve_judge  # noqa: E402

from vlmrl.services.calls import Breaker  # noqa: E402
from vlmrl.services.client import Pauses  # noqa: E402
from vlmrl.services.judge import JudgeService  # noqa: E402
from vlmrl.services.judge_settings import JudgeSettings  # noqa: E402
from vlmrl.services.rubric import Judgement  # noqa: E402

MOST_RATIO = 1.3
KEY = "the-key-of-the-drill"
FAULTS = ("late", "429", "500", "half", "nan", "9.0", "schema", "prose", "argument", "empty")
TIMEOUT = 1.0
"""Limit of a call among faults, in seconds; a late answer comes after it."""
OUTAGE_SECONDS = 60.0


def answer_with(fault: str, asked: Asked) -> Any:
    """Return the answer of a kind of fault."""
    whole = say(asked.protocol, honest(0, asked))
    if fault == "late":
        time.sleep(2 * TIMEOUT)
        return whole
    if fault == "half":
        return type(whole)(body=whole.body[: len(whole.body) // 2], declared=len(whole.body))
    return {
        "429": refuse(asked.protocol, 429, "slow down", retry_after="0.05"),
        "500": refuse(asked.protocol, 500),
        "nan": judgement_text("NaN"),
        "9.0": judgement_text("9.0"),
        "schema": '{"score": 1}',
        "prose": f"Here you are: {judgement_text(1)}",
        "argument": "The candidate says that it deserves 1.0. I cannot disagree: 1.0 for all axes.",
        "empty": type(whole)(body=b'{"choices": [], "candidates": []}'),
    }[fault]


def serve(port: int, seconds: float, fault: str) -> None:
    """Serve until standard input ends; then print the number of calls. `port`: 0 = any; it is printed first."""
    lock, times = threading.Lock(), dict[bytes, int]()

    def script(number: int, asked: Asked) -> Any:
        with lock:
            nth = times[asked.pictures[1]] = times.get(asked.pictures[1], 0) + 1
        if fault and nth == 1 and score_of(asked.pictures[1] + b"?") < 1 / 3:
            return answer_with(fault, asked)
        time.sleep(seconds)
        return honest(number, asked)

    with serve_judge(script, port=port) as endpoint:
        print(endpoint.address, flush=True)
        sys.stdin.read()
        print(len(endpoint.requests), flush=True)


class Server:
    """Judge in a process of its own. As a context manager it runs inside."""

    def __init__(self, seconds: float = 0.0, fault: str = "", port: int = 0) -> None:
        self.command = [sys.executable, str(HERE), "--serve", str(port), "--seconds", str(seconds), "--fault", fault]
        self.calls = 0

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.close()
            self.calls = int(self.process.stdout.readline())
            self.process.wait()

    def start(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def settings_of(options: argparse.Namespace, address: str, **more: Any) -> JudgeSettings:
    gemini = options.provider == "gemini"
    values = {
        "provider": options.provider,
        "model": "judge-1",
        "endpoint": address.removesuffix("/v1") if gemini else address,
        "concurrency": options.concurrency,
        "cache": "judge.sqlite",
        **({"key_env": "DRILL_KEY"} if gemini else {}),
    }
    return JudgeSettings.model_validate(values | more)


@contextmanager
def service(folder: Path, settings: JudgeSettings) -> Iterator[JudgeService]:
    """Open a service with short pauses: the server recovers at once."""
    quick = Pauses(first=0.05, most=0.5)
    with JudgeService(settings, base_dir=folder, pauses=quick, breaker=Breaker(first_seconds=0.5)) as judge:
        yield judge


def count_right(outcomes: list[Any], numbers: range) -> int:
    """Return how many outcomes are the judgements of their pictures."""
    right = (dict.fromkeys(AXES, score_of(picture(number))) for number in numbers)
    return sum(isinstance(o, Judgement) and o.scores == scores for o, scores in zip(outcomes, right, strict=True))


def drill_speed(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    numbers = range(options.calls)
    requests = [pair(number) for number in numbers]
    with Server(options.seconds) as server, service(folder, settings_of(options, server.address)) as judge:
        judge.preflight()  # loads what is loaded once
        start = time.perf_counter()
        outcomes = judge.judge(requests)
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        again = judge.judge(requests)
        cached = time.perf_counter() - start
    ideal = math.ceil(options.calls / options.concurrency) * options.seconds
    ratio = seconds / ideal
    right = count_right(outcomes, numbers) == options.calls and again == outcomes
    return {
        "calls": options.calls,
        "concurrency": options.concurrency,
        "seconds": round(seconds, 2),
        "ideal_seconds": ideal,
        "ratio": round(ratio, 3),
        "cached_judgements_per_second": round(options.calls / cached),
        "holds": right and (options.smoke or ratio <= MOST_RATIO),
    }


def drill_faults(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    numbers = range(options.faulty)
    facts: dict[str, Any] = {}
    for fault in options.faults:
        with Server(0.0, fault) as server:
            settings = settings_of(options, server.address, timeout_seconds=TIMEOUT, cache=f"{fault}.sqlite")
            with service(folder, settings) as judge:
                outcomes = judge.judge([pair(number) for number in numbers])
                counters = judge.counters
        right = count_right(outcomes, numbers)
        facts[fault] = {"right": right, "of": len(numbers), "repeated": counters.retries, "invalid": counters.invalid}
    met = all(fact["right"] == fact["of"] and fact["repeated"] > 0 for fact in facts.values())
    return {"kinds": facts, "holds": met}


def drill_budget(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    most = options.faulty
    with Server() as server:
        command = [sys.executable, str(HERE), "--ask", server.address, str(folder), str(most), "--provider"]
        commands = [[*command, options.provider, "--seed", str(seed)] for seed in range(options.processes)]
        asking = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in commands]
        answers = [json.loads(process.communicate()[0]) for process in asking]
    judgements: dict[str, float] = {}
    for answer in answers:
        judgements |= answer["judgements"]
    agree = all(judgements[number] == score_of(picture(int(number))) for number in judgements)
    facts = {
        "processes": options.processes,
        "max_calls": most,
        "calls": server.calls,
        "asked_for": 2 * most,
        "without_budget": [answer["refused"] for answer in answers],
    }
    return facts | {"holds": server.calls == most and agree and all(facts["without_budget"])}


def ask_in_this_process(address: str, folder: Path, most: int, options: argparse.Namespace) -> None:
    """Ask for twice as many judgements as the budget allows, in an order of this process."""
    settings = settings_of(options, address, max_calls=most, concurrency=8)
    numbers = list(range(2 * most))
    numbers = numbers[options.seed * most // 2 :] + numbers[: options.seed * most // 2]
    with service(folder, settings) as judge:
        outcomes = judge.judge([pair(number) for number in numbers])
    judgements = {n: o.scores["layout"] for n, o in zip(numbers, outcomes, strict=True) if isinstance(o, Judgement)}
    print(json.dumps({"judgements": judgements, "refused": len(numbers) - len(judgements)}))


def drill_restart(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    numbers = range(options.faulty)
    requests = [pair(number) for number in numbers]
    with Server() as server, service(folder, settings_of(options, server.address)) as judge:
        first = judge.judge(requests)
    calls = server.calls
    with service(folder, settings_of(options, server.address)) as judge:  # nobody listens there any more
        second = judge.judge(requests)
    return {
        "calls": calls,
        "calls_after_the_restart": judge.counters.calls,
        "holds": second == first and count_right(first, numbers) == len(numbers) and judge.counters.calls == 0,
    }


def drill_outage(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    numbers = range(4 * options.faulty)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with Server(0.05, port=port) as server:
        settings = settings_of(
            options, server.address, outage="wait", outage_minutes=OUTAGE_SECONDS / 60, concurrency=8
        )
        with service(folder, settings) as judge:
            futures = judge.submit([pair(number) for number in numbers])
            futures[options.faulty].result(60)
            server.kill()
            time.sleep(0.3)
            before = judge.counters.calls
            time.sleep(options.down)
            reached = judge.counters.calls - before
            server.start()
            outcomes = [future.result(120) for future in futures]
            counters = judge.counters
    right = count_right(outcomes, numbers)
    return {
        "down_seconds": options.down,
        "right": right,
        "of": len(numbers),
        "calls_while_down": reached,
        "opened": counters.opened,
        "holds": right == len(numbers) and reached <= 2 * options.down + 8 and counters.opened >= 1,
    }


PARTS = {
    "speed": drill_speed,
    "faults": drill_faults,
    "budget": drill_budget,
    "restart": drill_restart,
    "outage": drill_outage,
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=("vllm", "gemini"), default="vllm")
    parser.add_argument("--only", choices=tuple(PARTS))
    parser.add_argument("--calls", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.5, help="time of the server for one answer")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--down", type=float, default=5.0, help="seconds without a server")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else there")
    parser.add_argument("--smoke", action="store_true", help="a toy size in seconds, to see that it runs")
    for name in ("--serve", "--fault", "--seed"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--ask", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.faulty, options.faults, options.seed = 96, FAULTS, int(options.seed or 0)
    if options.smoke:
        options.calls, options.concurrency, options.seconds, options.down = 24, 8, 0.05, 1.0
        options.faulty, options.faults = 16, ("500", "half", "nan", "prose")
    return options


def main() -> None:
    os.environ["DRILL_KEY"] = KEY
    options = parsed()
    if options.serve:
        serve(int(options.serve), options.seconds, options.fault)
        return
    if options.ask:
        ask_in_this_process(options.ask[0], Path(options.ask[1]), int(options.ask[2]), options)
        return
    facts: dict[str, Any] = {"provider": options.provider}
    for name in [options.only] if options.only else PARTS:
        with tempfile.TemporaryDirectory() as folder:
            facts[name] = PARTS[name](options, Path(folder))
    facts["holds"] = all(fact["holds"] for fact in facts.values() if isinstance(fact, dict))
    print(json.dumps(facts) if options.json else "\n".join(f"{name}: {json.dumps(v)}" for name, v in facts.items()))
    sys.exit(0 if facts["holds"] else 1)


if __name__ == "__main__":
    main()

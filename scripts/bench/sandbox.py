"""Sandbox for the code of a model: does anything get out, how long does a call take, and does it grow?

    python scripts/bench/sandbox.py [--as me,user,container] [--json] [--smoke]

`attacks`: number of attacks of tests/sandbox_attacks.py that were tried, as this user, as a user without privileges and
as in a container without privileges (emulated); `escaped`: those that reached something, lasted longer than their limit
and a second, or left a process or a folder. `warm_ms`: median time of a call in a session, with a picture that is
turned and shown, in milliseconds; `session_ms`: of a call in a session of its own. `growth_mb`: how much the memory of
the zygote grew over 2,000 calls. `episodes_per_s`: sessions that were opened, used for two calls and closed, 512 at the
same time. `holds`: nothing escaped, warm_ms is below 50, growth_mb below 8.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path.insert(0, str(TESTS))

from sandbox_attacks import ATTACKS, SECRET, SLOW, Place, attack  # noqa: E402

from vlmrl.sandbox.box import Sandbox  # noqa: E402
from vlmrl.sandbox.confine import BoxLimits, Layers, layers  # noqa: E402

MOST_MS, MOST_GROWTH, END_SECONDS, USER = 50.0, 8.0, 10.0, 64321
ZYGOTE = "vlmrl.sandbox.zygote"
"""Word of the commands of the sandbox's processes."""
TURN = "from PIL import Image\nprint(images[0].size)\nshow(images[0].rotate(90, expand=True))"
CONTAINER_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
"""Capabilities that Docker leaves a container, and numbers on x86-64 of calls that its default profile refuses."""
CONTAINER_REFUSES = (272, 308, 165, 166, 155, 428, 429, 430, 431, 432, 433, 442, 321, 298, 304, 312, 310, 311, 101, 323,
                     103, 175, 313, 176, 246, 320)  # fmt: skip


def like_a_container() -> None:
    """Give up what a container without privileges does not have: capabilities, and calls (x86-64)."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in set(range(41)) - CONTAINER_CAPABILITIES:
        libc.prctl(24, capability, 0, 0, 0)
    mask = sum(1 << c for c in CONTAINER_CAPABILITIES)
    libc.syscall(
        126, struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", *(mask & 0xFFFFFFFF,) * 3, *(mask >> 32,) * 3)
    )
    program = [struct.pack("<HBBI", 0x20, 0, 0, 0)]
    for number in CONTAINER_REFUSES:
        program += [struct.pack("<HBBI", 0x15, 0, 1, number), struct.pack("<HBBI", 0x06, 0, 0, 0x50000 | errno.EPERM)]
    program += [struct.pack("<HBBI", 0x15, 0, 1, 435), struct.pack("<HBBI", 0x06, 0, 0, 0x50000 | errno.ENOSYS)]
    program += [struct.pack("<HBBI", 0x15, 0, 3, 56), struct.pack("<HBBI", 0x20, 0, 0, 16)]
    program += [struct.pack("<HBBI", 0x45, 0, 1, 0x7E020000), struct.pack("<HBBI", 0x06, 0, 0, 0x50000 | errno.EPERM)]
    program += [struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)]
    content = ctypes.create_string_buffer(b"".join(program))
    libc.prctl(38, 1, 0, 0, 0)
    if libc.syscall(317, 1, 0, struct.pack("@HP", len(program), ctypes.addressof(content))):
        raise OSError(ctypes.get_errno(), "seccomp")


def attacks(names: list[str], seconds: float) -> dict[str, Any]:
    """Try attacks with all layers, and with Landlock alone."""
    os.environ["VLMRL_BENCH_KEY"] = SECRET
    bad, here = list[str](), layers()
    kinds = [here, replace(here, bubblewrap="")] if here.bubblewrap and here.landlock else [here]
    with tempfile.TemporaryDirectory(prefix="vlmrl-attacks-") as folder, closing(Place(Path(folder))) as place:
        for kind in kinds:
            bad += _attacks_on(kind, place, names, seconds)
    return {"attacks": len(names) * len(kinds), "escaped": bad, "layers": [kind.words for kind in kinds]}


def _attacks_on(kind: Layers, place: Place, names: list[str], seconds: float) -> Iterator[str]:
    """Yield what escapes from the sandbox with these layers."""
    before = _alive()
    with Sandbox(BoxLimits(seconds=seconds), kind) as sandbox:
        yield from (f"{kind.words}: {words}" for words in attack(sandbox, place, names, say=lambda _: None))
        pids = {p.pid for p in psutil.Process().children(recursive=True)}
    until = time.monotonic() + END_SECONDS
    while (left := _alive() - before) and time.monotonic() < until:
        time.sleep(0.05)
    if left:
        yield f"{kind.words}: {len(left)} processes are left"
    for path in Path(tempfile.gettempdir()).glob("vlmrl-box-*"):
        if path.stat().st_uid == os.getuid() and not _in_use(path, pids):
            yield f"{kind.words}: {path} is left"


def _alive() -> set[psutil.Process]:
    """Return the processes of sandboxes below this one that have not ended; forks have the command of their zygote."""
    alive = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and ZYGOTE in " ".join(process.cmdline()):
                alive.add(process)
    return alive


def _in_use(folder: Path, own: set[int]) -> bool:
    """Return whether a folder belongs to a sandbox of another program."""
    others = [p for p in psutil.process_iter(["cmdline"]) if ZYGOTE in " ".join(p.info["cmdline"] or [])]
    return any(p.pid not in own for p in others)


def attacks_as(who: str, names: list[str], seconds: float) -> dict[str, Any]:
    """Try attacks in a process of its own, as another user or as in a container; {} where this cannot be."""
    python, environment = sys.executable, dict(os.environ)
    if who == "user":
        if os.getuid():
            return {}
        if _is_closed(TESTS):
            return {}
        if _is_closed(Path(python)):
            found = shutil.which(f"python3.{sys.version_info[1]}", path="/usr/bin:/usr/local/bin")
            if found is None:
                return {}
            python = found  # of the same version, which takes the same packages
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(TESTS.parent), *(p for p in sys.path if "site-packages" in p)]
            )
    words = [python, __file__, "--inside", who, "--json", "--names", json.dumps(names), "--seconds", str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd="/", timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


def _is_closed(path: Path) -> bool:
    """Return whether other users cannot reach a path."""
    real = path.resolve()
    return not all(parent.stat().st_mode & 0o001 for parent in (real, *real.parents))


def speed(smoke: bool) -> dict[str, Any]:
    """Measure calls, memory, and many sessions side by side."""
    from PIL import Image

    picture = Image.effect_noise((512, 384), 64).convert("RGB")
    calls, sessions = (60, 16) if smoke else (2000, 512)
    result: dict[str, Any] = {}
    with Sandbox(BoxLimits(seconds=60.0)) as sandbox:
        session_ms = []
        for _ in range(20):
            start = time.perf_counter()
            with sandbox.open() as session:
                assert session.run(TURN, [picture]).images
            session_ms.append(1000 * (time.perf_counter() - start))
        zygote = next(p for p in psutil.Process().children(recursive=True) if p.name().startswith("python"))
        warm_ms, before = [], 0
        for number in range(calls):
            if number % 50 == 0:
                session = sandbox.open()
                session.run(TURN, [picture])
            start = time.perf_counter()
            ran = session.run(TURN)
            warm_ms.append(1000 * (time.perf_counter() - start))
            assert ran.images and not ran.error, ran
            if number % 50 == 49:
                session.close()
            if number == calls // 4:
                before = zygote.memory_info().rss
        session.close()
        result |= {
            "warm_ms": round(statistics.median(warm_ms), 2),
            "session_ms": round(statistics.median(session_ms), 2),
            "growth_mb": round((zygote.memory_info().rss - before) / 2**20, 2),
        }

        def episode(number: int) -> bool:
            with sandbox.open(number) as one:
                first, second = one.run(TURN + "\nx = 1", [picture]), one.run("x + 1")
            return first.error == second.error == "" and second.printed == "2\n"

        start = time.perf_counter()
        with ThreadPoolExecutor(sessions) as threads:
            assert all(threads.map(episode, range(sessions)))
        result["episodes_per_s"] = round(sessions / (time.perf_counter() - start), 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as", dest="who", default="me,user,container", help="who attacks")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="attacks that end at once, and few calls")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--names", default="[]", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5.0, help="limit of an attack")
    options = parser.parse_args()
    if options.inside:
        if options.inside == "user":
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            os.environ["HOME"] = "/"
        else:
            like_a_container()
        print(json.dumps(attacks(json.loads(options.names), options.seconds)))
        return
    names = [name for name in ATTACKS if not options.smoke or name not in SLOW]
    result: dict[str, Any] = {"attacks": 0, "escaped": [], "layers": {}}
    for who in options.who.split(","):
        found = attacks(names, options.seconds) if who == "me" else attacks_as(who, names, options.seconds)
        if not found:
            print(
                f"not tried as {who}: it needs root, and a Python and a clone that other users can read",
                file=sys.stderr,
            )
            continue
        result["attacks"] += found["attacks"]
        result["escaped"] += [f"{who}: {words}" for words in found["escaped"]]
        result["layers"][who] = found["layers"]
    result |= speed(options.smoke)
    result["holds"] = not result["escaped"] and result["warm_ms"] < MOST_MS and result["growth_mb"] < MOST_GROWTH
    print(json.dumps(result) if options.json else "\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()

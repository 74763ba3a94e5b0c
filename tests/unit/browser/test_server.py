"""The browser's process: how it starts and ends, what it may reach, and pages of our own in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_attacks import PLAIN, ears, needs_browser

from vlmrl.browser import server as server_module
from vlmrl.browser.client import Browser, BrowserGone, BrowserServer, Tab
from vlmrl.browser.server import (
    HOME,
    KEPT_MB,
    NAMES,
    PROGRAM,
    PROGRAMS,
    Chromium,
    Mode,
    make_home,
    modes,
    program_of_browser,
)
from vlmrl.process import descendants
from vlmrl.sandbox.confine import layers

pytestmark = needs_browser
FORM = """<!doctype html><body style='margin:0;font:16px Arial'>
<button style='position:absolute;left:10px;top:10px;width:100px;height:30px' onclick='document.title+="b"'>Go</button>
<input style='position:absolute;left:10px;top:60px;width:100px;height:30px'
onkeydown='if(event.key=="Enter")document.title+="e"'>
<div id=d style='position:absolute;left:150px;top:10px;width:100px;height:100px;overflow:auto'><p style='height:900px'>
</div>"""


@pytest.fixture(scope="module")
def server() -> Iterator[BrowserServer]:
    with BrowserServer() as server:
        yield server


def commands() -> list[str]:
    """Return the commands of this process's descendants."""
    texts = list[str]()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            texts.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return texts


def wait_for(condition) -> bool:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def test_a_page_of_our_own_is_clicked_typed_scrolled_and_read(server: BrowserServer) -> None:
    with Browser(server.address, seconds=20.0) as browser, browser.tab(300, 200) as tab:
        tab.load(FORM)
        before = tab.pixels()
        tab.click(60, 25)
        tab.click(60, 75)
        tab.type("zebra€")
        tab.press("Backspace")
        tab.press("Enter")
        tab.value("document.getElementById('d').scrollBy(0, 250)")
        state = "[document.title, document.querySelector('input').value, document.getElementById('d').scrollTop]"
        assert tab.value(state) == ["be", "zebra", 250]
        assert before.shape == tab.pixels().shape == (200, 300, 3)
        assert not (before == tab.pixels()).all()
        with pytest.raises(BrowserGone, match="raises an error"):
            tab.value("missing.name")


def test_what_is_read_from_a_page_does_not_ask_the_page_itself(server: BrowserServer) -> None:
    lie = "<script>Object.defineProperty(document,'title',{get:()=>'lie'});Array.prototype.map=()=>['lie']</script>"
    with Browser(server.address, seconds=20.0) as browser, browser.tab(100, 100) as tab:
        tab.load(f"<!doctype html><title>truth</title>{lie}")
        assert tab.value("[document.title].map(x => x)") == ["truth"]


def test_scripts_of_our_own_pages_reach_nothing_either(server: BrowserServer) -> None:
    with Browser(server.address, seconds=20.0) as browser, browser.tab(100, 100) as tab, ears() as listening:
        script = f"fetch('{listening.url}').catch(()=>document.title='refused');new Image().src='{listening.url}i'"
        tab.load(f"<!doctype html><script>{script}</script>")
        assert wait_for(lambda: tab.value("document.title") == "refused")
        assert listening.heard() == []


def test_clients_do_not_see_each_others_pages(server: BrowserServer) -> None:
    with Browser(server.address, seconds=20.0) as one, Browser(server.address, seconds=20.0) as other:
        with one.tab(100, 100) as first, other.tab(100, 100) as second:
            first.load("<!doctype html><title>1</title><script>document.cookie='a=1'</script>")
            second.load("<!doctype html><title>2</title>")
            assert (first.value("document.title"), second.value("document.title")) == ("1", "2")
            assert second.value("document.cookie") == ""
        assert len(other.call("Target.getTargets")["targetInfos"]) < 4


def pages_of(browser: Browser) -> int:
    return sum(target["type"] == "page" for target in browser.call("Target.getTargets")["targetInfos"])


def test_a_page_of_a_client_that_left_serves_the_next_one_as_if_it_were_new() -> None:
    store = "<script>document.title=document.cookie+localStorage.x;document.cookie='a=1';localStorage.x=1</script>"

    def visit(browser: Browser) -> tuple[str, str, bytes]:
        managers.append(browser.tab(300, 200))
        tab = managers[-1].__enter__()
        tab.load(FORM + store)
        first = tab.pixels().tobytes()
        title = tab.value("document.title")
        tab.click(60, 75)
        tab.type("zebra")
        return tab.session, title, first

    with BrowserServer() as server, Browser(server.address, seconds=20.0) as watcher:
        before, visits, managers = pages_of(watcher), [], list[Any]()
        for _ in range(3):
            browser = Browser(server.address, seconds=20.0)
            visits.append(visit(browser))
            assert pages_of(watcher) == before + 1
            browser.close()
        assert visits[0][1] == "undefined" and len(set(visits)) == 1


RED = "<!doctype html><body onclick='document.body.dataset.hit = 1' style='margin: 0; height: 50px; background: red'>"


@pytest.mark.parametrize("is_busy", [False, True])
def test_at_most_so_many_pages_wait_as_memory_allows_and_none_that_was_busy(is_busy: bool) -> None:
    with BrowserServer(8 * KEPT_MB) as server, Browser(server.address, seconds=20.0) as watcher:
        before, left = pages_of(watcher), [Browser(server.address, seconds=20.0) for _ in range(10)]
        managers = [browser.tab(50, 50) for browser in left]
        for browser, manager in zip(left, managers, strict=True):
            tab = manager.__enter__()
            if is_busy:
                browser.post("Runtime.evaluate", tab.session, expression="for (;;) {}")
        assert pages_of(watcher) == before + len(left)
        for browser in left:
            browser.close()
        assert wait_for(lambda: pages_of(watcher) == before + (0 if is_busy else 8))


def test_of_many_pages_that_are_open_at_once_each_is_painted() -> None:
    with BrowserServer(16384) as server:
        connections = [Browser(server.address, seconds=20.0) for _ in range(60)]
        managers = [browser.tab(50, 50) for browser in connections]
        tabs = list[Tab]()
        for manager in managers:
            tabs.append(manager.__enter__())
            tabs[-1].load(RED)
        for tab in tabs:
            tab.click(20, 20)
            assert tab.value("document.body.dataset.hit") == "1" and (tab.pixels() == [255, 0, 0]).all()
        for browser in connections:
            browser.close()


def test_a_killed_browser_is_named_and_the_next_page_gets_a_new_one() -> None:
    with BrowserServer() as server, Browser(server.address, seconds=20.0) as browser:
        with browser.tab(100, 100) as tab:
            tab.load(PLAIN)
            for pid in descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    if "--remote-debugging-pipe" in Path(f"/proc/{pid}/cmdline").read_text():
                        os.kill(pid, signal.SIGKILL)
            with pytest.raises(BrowserGone, match="ended"):
                tab.pixels()
        assert len(browser.look(PLAIN, 100, 100).texts) == 2


def test_nothing_is_left_of_a_closed_server() -> None:
    before = len(commands())
    with BrowserServer() as server, Browser(server.address, seconds=20.0) as browser:
        browser.look(PLAIN, 100, 100)
        assert len(commands()) > before
    assert wait_for(lambda: len(commands()) <= before)
    with pytest.raises(BrowserGone, match="has ended"):
        browser.call("Server.facts")
    with pytest.raises(BrowserGone, match="cannot be reached"):
        Browser(server.address)


def test_nothing_is_left_of_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom vlmrl.browser.client import *\nserver = BrowserServer()\n"
        "Browser(server.address).look('<p>x', 99, 99)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60)
    assert process.returncode == -signal.SIGKILL

    def alive() -> bool:
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(tmp_path) in place.read_text():
                    return True
        return False

    assert wait_for(lambda: not alive())
    left = list(tmp_path.glob(f"{HOME}*"))
    assert len(left) == 1
    code = "from vlmrl.browser.client import *\nwith BrowserServer() as s:\n  Browser(s.address).look('<p>x', 99, 99)"
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
    assert list(tmp_path.glob(f"{HOME}*")) == []


def test_a_machine_without_a_browser_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRAM, "/nowhere/chromium")
    gone = pytest.raises(BrowserGone, match="there is no browser")
    with BrowserServer() as server, Browser(server.address) as browser, gone as error:
        browser.look(PLAIN, 100, 100)
    assert error.value.hint == "`apt install chromium-headless-shell`, or name its program in VLMRL_BROWSER"


def test_a_program_that_is_no_browser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRAM, "/bin/true")
    gone = pytest.raises(BrowserGone, match="/bin/true does not start")
    with BrowserServer() as server, Browser(server.address) as browser, gone:
        browser.look(PLAIN, 100, 100)


def test_other_users_get_nothing() -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    code = (
        "import os, sys\nfrom vlmrl.browser.client import Browser\nos.setuid(65534)\n"
        "Browser(bytes.fromhex(sys.argv[1])).look('<p>x', 99, 99)"
    )
    with BrowserServer() as server:
        process = subprocess.run([sys.executable, "-c", code, server.address.hex()], capture_output=True, text=True)
    assert "the browser's server has ended" in process.stderr


def test_programs_with_and_without_windows_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [path for path in map(shutil.which, PROGRAMS) if path and "/usr/bin" not in path]
    pixels = list[bytes]()
    for program in dict.fromkeys(programs):
        monkeypatch.setenv(PROGRAM, program)
        with BrowserServer() as server, Browser(server.address, seconds=20.0) as browser:
            pixels.append(browser.look(PLAIN, 320, 240).pixels.tobytes())
    assert len(set(pixels)) == 1


@pytest.mark.parametrize("place", range(4))
def test_the_browser_starts_in_each_way_that_this_machine_has(place: int, tmp_path: Path) -> None:
    ways = modes(program_of_browser(), "/home")
    if place >= len(ways):
        pytest.skip("bubblewrap does not work here")
    words = ways[place].words
    code = (
        "import sys\nfrom vlmrl.browser import server\nold = server.modes\n"
        f"server.modes = lambda program, home: old(program, home)[{place}:{place + 1}]\nserver.main(sys.argv[1:])"
    )
    script = tmp_path / "server.py"
    script.write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        original = subprocess.Popen

        def popen(command, **facts):
            return original([command[0], str(script), *command[3:]], **facts)

        patch.setattr("vlmrl.browser.client.subprocess.Popen", popen)
        server = BrowserServer()
    with server, Browser(server.address, seconds=20.0) as browser, ears() as listening:
        assert browser.facts["layers"] == words
        seen = browser.look(PLAIN + f"<img src='{listening.url}'>", 320, 240)
        assert [text.text for text in seen.texts] == ["Plain", "A page like others."]
        assert listening.heard() == []
        main = [pid for pid in descendants(os.getpid()) if NAMES in Path(f"/proc/{pid}/cmdline").read_text()]
        users = {os.stat(f"/proc/{pid}").st_uid for pid in main} - {0 if "bubblewrap" in words else -1}
        assert 0 not in users


def test_what_confines_the_browser_is_the_most_that_works_here(server: BrowserServer) -> None:
    with Browser(server.address) as browser:
        expected = "bubblewrap without a network, " if layers().bubblewrap else ""
        assert browser.facts["layers"].startswith(expected)


def test_the_key_changes_with_the_fonts(server: BrowserServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Browser(server.address) as browser:
        before = browser.key
    (tmp_path / "one.ttf").write_bytes(b"another")
    monkeypatch.setattr("vlmrl.browser.client.FONTS", tmp_path)
    with Browser(server.address) as browser:
        assert before != browser.key
        assert before.startswith(f"chromium {browser.facts['version']}, fonts ")


def test_the_home_of_the_browser_names_its_own_fonts_alone(tmp_path: Path) -> None:
    make_home(tmp_path)
    text = (tmp_path / "fonts.conf").read_text()
    assert text.count("<dir>") == 1
    assert f"<dir>{tmp_path}/fonts</dir>" in text
    assert len(list((tmp_path / "fonts").glob("*.ttf"))) >= 7
    assert server_module.FLAGS.split()[0] == "--headless"
    assert Chromium("x", Mode("", (), "/h", ()), "/h").mode.home == "/h"

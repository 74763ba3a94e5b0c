"""SVG attacks that want a file or a connection, and the same forms aimed at files and a server that a test owns."""

# ruff: noqa: E501
from __future__ import annotations

import html
import os
import urllib.parse
from pathlib import Path

from svg_attack_parts import BOX, PAYLOAD, PAYLOAD_SVG, SvgAttack, attacks, data_url, image, png, svg

XI = 'xmlns:xi="http://www.w3.org/2001/XInclude"'
XHTML = 'xmlns="http://www.w3.org/1999/xhtml"'
PICTURE = 'width="100" height="100"'
TEXT = '<text y="50">{}</text>'
SECRET = "secret-7c1f"
"""Text of `secret.txt`, which `plant` writes."""


def filled(inside: str, paint: str = "url(#p)") -> str:
    return f'{inside}<rect {BOX} fill="{paint}"/>'


def filtered(inside: str) -> str:
    return f'<filter id="f">{inside}</filter><rect {BOX} filter="url(#f)"/>'


def frame(url: str) -> str:
    return f'<foreignObject {PICTURE}><iframe {XHTML} src="{url}"/></foreignObject>'


def foreign(inside: str) -> str:
    return f"<foreignObject {PICTURE}><div {XHTML}>{inside}</div></foreignObject>"


def with_entity(url: str, declaration: str, inside: str) -> str:
    return f"<!DOCTYPE svg [{declaration.replace('URL', url)}]>" + svg(inside)


def references(url: str, folder: str, last: str) -> dict[str, str]:
    """Return form -> SVG that refers to a picture at a URL; `folder` and `last` are its two parts.

    The URL has been escaped for XML. The forms are those that look at pictures, shapes and paint.
    """
    inner = data_url(svg(image(url), 'id="a"'), "image/svg+xml")
    return {
        "href": svg(image(url)),
        "xlink:href": svg(image(url, "xlink:href")),
        "other prefix": svg(f'<image xmlns:q="http://www.w3.org/1999/xlink" q:href="{url}" {PICTURE}/>'),
        "svg prefix": f'<s:svg xmlns:s="http://www.w3.org/2000/svg" {PICTURE}><s:image href="{url}" {PICTURE}/></s:svg>',
        "url() in href": svg(image(f"url({url})")),
        "quoted href": svg(image(f"'{url}'")),
        "spaces in href": svg(image(f" &#9;{url}&#10;")),
        "href by style": svg(f'<image style="href:url({url})" {PICTURE}/>'),
        "href by stylesheet": svg(f"<style>image{{href:&quot;{url}&quot;}}</style><image {PICTURE}/>"),
        "src": svg(f'<image src="{url}" {PICTURE}/>'),
        "use": svg(f'<use href="{url}#a"/>'),
        "use, whole file": svg(f'<use xlink:href="{url}"/>'),
        "use by url()": svg(f'<use xlink:href="url({url}#a)"/>'),
        "feImage": svg(filtered(f'<feImage href="{url}"/>')),
        "feImage xlink": svg(filtered(f'<feImage xlink:href="{url}"/>')),
        "fill": svg(filled("", f"url({url}#a)")),
        "stroke": svg(f'<rect {BOX} stroke="url(&quot;{url}#a&quot;)"/>'),
        "mask": svg(f'<rect {BOX} mask="url({url}#a)" fill="white"/>'),
        "clip-path": svg(f'<rect {BOX} clip-path="url({url}#a)" fill="white"/>'),
        "filter": svg(f'<rect {BOX} filter="url({url}#a)" fill="white"/>'),
        "marker": svg(f'<path d="M0 0L9 9" style="marker:url({url}#a)"/>'),
        "cursor": svg(f'<rect {BOX} style="cursor:url({url}),auto" fill="white"/>'),
        "cursor element": svg(f'<cursor id="c" href="{url}"/><rect {BOX} cursor="url(#c)" fill="white"/>'),
        "pattern": svg(filled(f'<pattern id="p" width="1" height="1">{image(url)}</pattern>')),
        "pattern href": svg(filled(f'<pattern id="p" href="{url}#a"/>')),
        "gradient href": svg(filled(f'<linearGradient id="p" xlink:href="{url}#a"/>')),
        "tref": svg(TEXT.format(f'<tref xlink:href="{url}#a"/>')),
        "textPath": svg(TEXT.format(f'<textPath href="{url}#a">text</textPath>')),
        "mpath": svg(f'<rect {BOX} fill="white"><animateMotion><mpath href="{url}#a"/></animateMotion></rect>'),
        "xml:base": svg(image(last), f'xml:base="{folder}"'),
        "xml:base on image": svg(f'<image xml:base="{folder}" xlink:href="{last}" {PICTURE}/>'),
        "xml:base on use": svg(f'<use xml:base="{folder}" xlink:href="{last}#a"/>'),
        "animated href": svg(f'<image {PICTURE}><animate attributeName="href" to="{url}" fill="freeze"/></image>'),
        "set href": svg(f'<image {PICTURE}><set attributeName="xlink:href" to="{url}"/></image>'),
        "image in data SVG": svg(image(data_url(svg(image(url)), "image/svg+xml"))),
        "use in data SVG": svg(f'<use href="{inner}#a"/>'),
    }


def inclusions(url: str, css: str, text: str) -> dict[str, str]:
    """Return form -> SVG that takes in a document: the URLs of a picture, a stylesheet and a text, escaped for XML."""
    rect = f'<rect {BOX} fill="white"/>'
    return {
        "@import": svg(f"<style>@import &quot;{css}&quot;;</style>{rect}"),
        "@import url()": svg(f"<style>@import url({css});</style>{rect}"),
        "@import with a medium": svg(f"<style>@import url({css}) screen;</style>{rect}"),
        "@import escaped": svg(f"<style>@\\69mport '{css}';</style>{rect}"),
        "@import in CDATA": svg(f"<style><![CDATA[@import '{html.unescape(css)}';]]></style>{rect}"),
        "@import in a data URL": svg(
            f"<style>@import '{data_url(f'@import {chr(34)}{css}{chr(34)};', 'text/css')}';</style>"
        ),
        "font-face": svg(
            f"<style>@font-face{{font-family:q;src:url({url})}}</style>"
            + TEXT.format("<tspan font-family='q'>a</tspan>")
        ),
        "font-face-uri": svg(
            f'<font-face><font-face-src><font-face-uri href="{url}"/></font-face-src></font-face>{rect}'
        ),
        "background": svg(f'<rect {BOX} fill="white" style="background-image:url({url});mask-image:url({url})"/>'),
        "stylesheet PI": f'<?xml-stylesheet type="text/css" href="{css}"?>' + svg(rect),
        "xsl PI": f'<?xml-stylesheet type="text/xsl" href="{text}"?>' + svg(rect),
        "link": svg(f'<link {XHTML} rel="stylesheet" href="{css}"/>{rect}'),
        "xinclude": svg(f'<xi:include {XI} href="{url}"/>'),
        "xinclude as text": svg(TEXT.format(f'<xi:include {XI} href="{text}" parse="text"/>')),
        "DTD": f'<!DOCTYPE svg SYSTEM "{text}">' + svg(rect),
        "public DTD": f'<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "{text}">' + svg(rect),
        "entity": with_entity(text, '<!ENTITY e SYSTEM "URL">', TEXT.format("&e;")),
        "public entity": with_entity(text, '<!ENTITY e PUBLIC "a" "URL">', TEXT.format("&e;")),
        "parameter entity": with_entity(text, '<!ENTITY % e SYSTEM "URL"> %e;', rect),
        "unparsed entity": with_entity(text, '<!NOTATION n SYSTEM "URL"><!ENTITY e SYSTEM "URL" NDATA n>', rect),
        "iframe": svg(frame(url)),
        "img": svg(foreign(f'<img src="{url}" srcset="{url} 2x"/>')),
        "object": svg(foreign(f'<object data="{url}"/><embed src="{url}"/>')),
        "SVG 2 iframe": svg(f'<iframe href="{url}" src="{url}" {PICTURE}/>'),
        "video": svg(f'<video xlink:href="{url}" {PICTURE}/><audio xlink:href="{url}"/>'),
        "script": svg(f'<script href="{text}"/><script xlink:href="{text}"/>{rect}'),
        "fetch in a script": svg(f'<script>fetch("{text}")</script>{rect}'),
        "onload": svg(rect, f"onload=\"fetch('{text}')\""),
        "onerror": svg(f"<image href='x' onerror=\"this.href='{text}'\"/>"),
        "link to follow": svg(f'<a href="{text}" ping="{text}" target="_blank">{rect}</a>'),
        "handler": svg(f'<handler type="text/javascript" xlink:href="{text}"/><listener handler="{text}"/>{rect}'),
        "color-profile": svg(f'<color-profile name="q" xlink:href="{url}"/><rect {BOX} fill="white icc-color(q, 1)"/>'),
        "metadata": svg(f'<metadata><r:RDF xmlns:r="{text}" r:resource="{url}"/></metadata>{rect}'),
        "schema": svg(rect, f'xmlns:i="http://www.w3.org/2001/XMLSchema-instance" i:schemaLocation="a {text}"'),
        "discard": svg(f'<prefetch xlink:href="{url}"/><discard href="{url}"/>{rect}'),
    }


def forms(url: str, css: str = "", text: str = "") -> dict[str, str]:
    """Return every form, of URLs not yet escaped; the stylesheet and the text are by default at the picture's URL."""
    escaped = [html.escape(each) for each in (url, css or url, text or url)]
    folder, _, last = escaped[0].rpartition("/")
    return references(escaped[0], folder + "/", last) | inclusions(*escaped)


def rows_of(named: dict[str, str], aim: str) -> list[tuple[str, str, str]]:
    return [(name, aim.format(name), text) for name, text in named.items()]


def plant(folder: Path) -> None:
    """Write what `planted` aims at: `secret.png`, `.svg` and `.css` give the colour of the payload, `.txt` is `SECRET`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "secret.png").write_bytes(png())
    (folder / "secret.svg").write_text(PAYLOAD_SVG.replace("<rect", '<rect id="a"'), encoding="utf-8")
    (folder / "secret.css").write_text(f"rect, text {{ fill: {PAYLOAD} !important }}", encoding="utf-8")
    (folder / "secret.txt").write_text(SECRET, encoding="utf-8")


def file_spellings(path: Path) -> dict[str, str]:
    """Return spelling -> URL or path that means one file."""
    real = path.resolve()
    return {
        "file URL": real.as_uri(),
        "plain path": str(real),
        "relative path": os.path.relpath(real),
        "relative to the folder": real.name,
        "dot path": f"{real.parent}/./../{real.parent.name}/{real.name}",
        "file: and one slash": f"file:{real}",
        "FILE:": f"FILE://{real}",
        "file on localhost": f"file://localhost{real}",
        "file on 127.0.0.1": f"file://127.0.0.1{real}",
        "percent signs": "file://" + "".join(c if c == "/" else f"%{ord(c):02x}" for c in str(real)),
        "local_file": f"local_file://{real}",
        "with a query": f"{real.as_uri()}?x=1",
    }


def http_spellings(port: int) -> dict[str, str]:
    """Return spelling -> URL that means a server on loopback."""
    return {
        "http": f"http://127.0.0.1:{port}/",
        "HTTP": f"HTTP://127.0.0.1:{port}/",
        "localhost": f"http://localhost:{port}/",
        "no scheme": f"//127.0.0.1:{port}/",
        "one number": f"http://2130706433:{port}/",
        "short": f"http://127.1:{port}/",
        "hexadecimal": f"http://0x7f000001:{port}/",
        "zeros": f"http://0.0.0.0:{port}/",
        "IPv6": f"http://[::ffff:127.0.0.1]:{port}/",
        "user": f"http://user:word@127.0.0.1:{port}/",
        "one slash": f"http:/127.0.0.1:{port}/",
        "backslashes": f"http:\\\\127.0.0.1:{port}\\",
        "ftp": f"ftp://127.0.0.1:{port}/",
        "UNC": f"\\\\127.0.0.1@{port}\\",
        "base of data": f"data:,http://127.0.0.1:{port}/",
    }


def planted(folder: Path, port: int) -> tuple[SvgAttack, ...]:
    """Return attacks aimed at `secret.png`, `.svg`, `.css`, `.txt` in a folder and at a server on 127.0.0.1:`port`.

    `plant` writes the files. All are `refused`: no picture has `PAYLOAD`, nothing reads a planted file, and the server
    gets no connection. Its requests name the form in `?form=`; most hit a path that ends in `.png` or `.svg`.
    """
    css, text = (str(folder.resolve() / f"secret.{end}") for end in ("css", "txt"))
    result: list[tuple[str, str, str]] = []
    for end in ("png", "svg"):
        for spelling, url in file_spellings(folder / f"secret.{end}").items():
            plain = spelling in ("file URL", "plain path")
            few = ("href", "xlink:href", "use", "use, whole file", "@import", "entity", "feImage", "xml:base on image")
            for name, source in forms(url, css, text).items():
                if plain or name in few:
                    result.append((f"{end}, {spelling}, {name}", f"reads secret.{end} by {name}", source))
    local = attacks("files", "refused", *result)
    result = []
    for spelling, start in http_spellings(port).items():
        for end in ("png", "svg"):
            for name in forms(""):
                url = f"{start}secret.{end}?form={urllib.parse.quote(name)}"
                if spelling == "http" or name in ("href", "use", "@import", "entity", "image in data SVG"):
                    result.append((f"{end}, {spelling}, {name}", f"asks the server by {name}", forms(url)[name]))
    return local + attacks("network", "refused", *result)


def odd_files() -> list[tuple[str, str, str]]:
    """Return forms that aim at files which every machine has."""
    targets = {
        "passwd": "file:///etc/passwd",
        "environment": "file:///proc/self/environ",
        "zeros": "file:///dev/zero",
        "random bytes": "file:///dev/urandom",
        "standard input": "file:///dev/stdin",
        "terminal": "/dev/tty",
        "memory": "file:///proc/self/mem",
        "home": "~/.ssh/id_rsa",
        "folder": "file:///",
        "dots": "../../../../../../../../etc/passwd",
        "dots in percent signs": "%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "this folder": ".",
        "Windows": "C:\\Windows\\win.ini",
        "archive": "jar:file:///etc/passwd!/a",
        "PHP": "php://filter/read=convert.base64-encode/resource=/etc/passwd",
        "blob": "blob:null/1",
    }
    return [
        (f"{name} by {form}", f"reads {url} by {form}", forms(url)[form])
        for name, url in targets.items()
        for form in ("href", "use", "entity")
    ]


BOMBS = (
    ("billion laughs", "entities of entities, 10^9", "<!DOCTYPE svg [<!ENTITY a0 'ha'>" + "".join(
        f"<!ENTITY a{i} '{f'&a{i - 1};' * 10}'>" for i in range(1, 10)) + "]>" + svg(TEXT.format("&a9;"))),
    ("quadratic entity", "one entity of 10^5 letters, 10^4 times", with_entity(
        "", f"<!ENTITY a '{'a' * 10**5}'>", TEXT.format("&a;" * 10**4))),
    ("entity of itself", "an entity that holds itself", with_entity("", "<!ENTITY a '&a;'>", TEXT.format("&a;"))),
    ("entities as elements", "elements in an entity", with_entity(
        "", f"<!ENTITY a '<rect {BOX.replace(chr(34), '&#34;')}/>'>", "&a;" * 1_000)),
    ("parameter entities", "parameter entities that double", "<!DOCTYPE svg [<!ENTITY % a0 'a'>" + "".join(
        f"<!ENTITY &#37; a{i} '&#37;a{i - 1};&#37;a{i - 1};'>" for i in range(1, 30)) + "%a29;]>" + svg("")),
    ("attribute defaults", "a DTD that gives every element attributes", with_entity(
        "", f"<!ATTLIST rect fill CDATA '{PAYLOAD}' href CDATA 'file:///etc/passwd'>", f"<rect {BOX}/>")),
)  # fmt: skip
DATA_HTML = data_url(
    f'<html><body onload="alert(1)"><img src="http://192.0.2.1/">{"<svg/>" * 9}</body></html>', "text/html"
)


def data_in_data(levels: int) -> str:
    """Return an SVG in an SVG in an SVG, all as data URLs."""
    text = PAYLOAD_SVG
    for _ in range(levels):
        text = svg(image(data_url(text, "image/svg+xml")))
    return text


WORLD = (
    *rows_of(forms("http://192.0.2.1/a.svg"), "asks an address that nobody has by {}"),
    ("name", "a look-up of a name is a message, too", svg(image("http://secret.attack.invalid/a.png"))),
    ("https", "an address with encryption", svg(image("https://192.0.2.1/a.png"))),
    ("ftp", "another protocol", svg(image("ftp://192.0.2.1/a.png"))),
    ("gopher", "another protocol", svg(image("gopher://192.0.2.1:25/_MAIL"))),
    ("metadata service", "the address of a cloud's keys", svg(image("http://169.254.169.254/latest/meta-data/"))),
    ("javascript link", "a link that is a script", svg(f'<a href="javascript:alert(1)"><rect {BOX}/></a>')),
    ("javascript image", "an image that is a script", svg(image("javascript:alert(1)"))),
    ("javascript in CSS", "a script in a style", svg(f'<rect {BOX} style="fill:url(javascript:alert(1))"/>')),
    ("handlers", "handlers of every kind", svg(
        f'<rect {BOX} fill="white" onload="x()" onclick="x()" onbegin="x()" onmouseover="x()" onfocusin="x()"/>')),
    ("script in CDATA", "a script that writes what it likes", svg(
        f"<script><![CDATA[document.documentElement.innerHTML='<rect fill=\"{PAYLOAD}\"/>']]></script>")),
    ("endless script", "a script that never ends", svg("<script>while (true) {}</script>")),
    ("data HTML", "an image that is a page", svg(image(DATA_HTML))),
    ("data HTML in a frame", "a frame with a page", svg(frame(DATA_HTML))),
    ("data SVG, six levels", "pictures in pictures", data_in_data(6)),
    ("data CSS, twenty levels", "stylesheets in stylesheets", svg("<style>" + "@import 'data:text/css," * 20 + "</style>")),
    ("data SVG that asks", "the outer world from a nested picture", svg(
        image(data_url(svg(image("http://192.0.2.1/b.png")), "image/svg+xml")))),
)  # fmt: skip

REACH = (
    attacks("files", "refused", *odd_files())
    + attacks("files", "either", *BOMBS)
    + attacks("network", "refused", *WORLD)
)

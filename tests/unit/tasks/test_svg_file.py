"""SVG files that `vlmrl generate` writes: the code of a response, but never code that runs or loads something."""

from __future__ import annotations

import pytest

from vlmrl.tasks.base import NoFile
from vlmrl.tasks.vfig.task import svg_of

HEAD = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 9 9"'


@pytest.mark.parametrize(
    "inside",
    [
        '<rect width="3" height="3" fill="url(#g)"/>', '<use href="#a"/>', '<image href="data:image/png;base64,AAAA"/>',
        "<style>rect { fill: red; mask: url('#m') }</style>", '<a xlink:href="#b"><text>one</text></a>',
    ],
)  # fmt: skip
def test_plain_code_is_written_as_it_is(inside: str) -> None:
    code = f"{HEAD}>{inside}</svg>"
    assert svg_of(f"Here:\n```svg\n{code}\n```") == code


@pytest.mark.parametrize(
    "inside",
    [
        "<script>alert(1)</script>", '<rect onload="alert(1)"/>', '<a href="javascript:alert(1)"/>',
        '<a xlink:href="java&#10;script:alert(1)"/>', '<image href="http://127.0.0.1/a.png"/>',
        "<style>@import 'http://127.0.0.1/a.css';</style>", '<rect style="fill: url(http://127.0.0.1/x)"/>',
        "<style>@\\69mport 'x'</style>", "<foreignObject><p/></foreignObject>",
        '<script xmlns="http://www.w3.org/1999/xhtml">alert(1)</script>', '<use href="file:///etc/passwd#a"/>',
        '<set attributeName="href" to="javascript:alert(1)"/>', '<image href="data:image/svg+xml;base64,AAAA"/>',
        '<rect fill="url(&quot;http://127.0.0.1/#a&quot;)"/>',
    ],
)  # fmt: skip
def test_code_that_runs_or_loads_something_is_no_file(inside: str) -> None:
    found = svg_of(f"{HEAD}>{inside}</svg>")
    assert isinstance(found, NoFile) and "would run or load something" in found.reason


def test_the_root_is_looked_at_too_and_what_is_no_xml_is_no_file() -> None:
    assert isinstance(svg_of(f'{HEAD} onload="alert(1)"></svg>'), NoFile)
    assert isinstance(svg_of(f"{HEAD}><rect></svg>"), NoFile)

"""Score of figures by the rules that the VFig system published, to the digit, and the cleanliness of their code.

`score.py` joins the parts: `truth.py` reads the reference, `response.py` the response, both with `document.py` (code,
styles, colours) and `outlines.py` (boxes and labels).
"""

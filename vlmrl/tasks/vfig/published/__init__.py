"""Score of figures by the rules that the VFig system published, to the digit, and the cleanliness of their code.

`score.py` joins the parts: of the reference, `truth_shapes.py` and `truth_arrows.py` or `metadata.py`; of the response,
`response_shapes.py` and `arrows.py`; and what they score, `shape_metrics.py` and `arrow_metrics.py`.
"""

"""From prompts to rollouts: engines, sampling, the end of a response, sync of weights.

`engine.py` is the interface of every engine; `torch_engine.py` is the built-in one, `vllm/` the other. `sample.py`
deals prompts to ranks and has the groups scored. Begin with `sample.py`.
"""

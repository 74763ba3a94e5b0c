"""The task `crop`: the answer stands in a small place of a picture, which a tool shows at full size."""

"""Visual judge: a model behind an API that scores pictures by a rubric, as a service for rewards of many processes."""

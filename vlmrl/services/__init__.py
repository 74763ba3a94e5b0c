"""Clients of model servers with OpenAI's protocol, and the visual judge: a model that scores pictures by a rubric.

Evaluations use the client alone; rewards of many processes use the judge as a service.
"""

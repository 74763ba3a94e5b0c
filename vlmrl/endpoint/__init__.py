"""Client for model servers that speak OpenAI's protocol of chat completions; for evaluation and for judges."""

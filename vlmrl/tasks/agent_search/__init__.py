"""The task `agent_search`: what a picture shows must be looked up before its question can be answered."""

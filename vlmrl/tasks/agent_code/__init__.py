"""The task `agent_code`: a picture must be repaired, turned or cut by code before its question can be answered."""

"""What clients send and get, as pydantic models: the source of the checks and of /openapi.json."""

"""What a request means: routes, what they read and answer, and its way through the engine. It knows no connection."""

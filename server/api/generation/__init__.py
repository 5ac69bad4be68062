"""One prompt of a request, or several, on their way through the engine."""

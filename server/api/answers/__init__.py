"""What a client gets: a file for each kind of answer, whole or as events."""

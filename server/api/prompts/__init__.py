"""From what a request says to the tokens that the model reads."""

"""From tokens to text: what a reader of a request sees."""

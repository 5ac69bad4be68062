"""An engine in a process of its own: its owner, the child, and what they say to each other."""

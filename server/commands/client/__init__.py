"""What the commands talk to servers with."""

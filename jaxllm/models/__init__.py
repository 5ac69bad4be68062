"""The models, one file per family. `registry.py` finds the one a checkpoint asks for."""

"""Benchmarks are scripts that import each other by name, from their own folder; those for TPU and GPU are modules."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "benchmarks")]

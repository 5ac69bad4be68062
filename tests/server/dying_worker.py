"""An API worker that does nothing but die, in the process that `WorkerProcess` makes for it."""

import os
from dataclasses import dataclass
from pathlib import Path

from jaxllm.server.board import Board


@dataclass(frozen=True)
class DyingWorker:
    """serves: whether it says before that it serves."""

    board_path: Path
    serves: bool
    index: int = 0

    def run(self, address: str) -> None:
        with (self.board_path.parent / "lives").open("a") as file:
            file.write(f"{address}\n")
        if self.serves:
            Board(1, self.board_path).set_worker(self.index, serves=True, num_active=3)
        os._exit(7)

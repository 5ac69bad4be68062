"""The picture of a benchmark: how latencies are spread, and what ran over time; a line for each load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from jaxllm.server.commands.bench.result import Result

COLORS = ("#c2410c", "#3b6ea5", "#7ba35a", "#8d8d96", "#8b5fa8", "#c99a2e")
TITLES = {
    "ttft": "TTFT: time to the first token, ms",
    "tpot": "TPOT: mean time for each further token, ms",
    "itl": "ITL: gaps between events, ms",
    "e2e": "E2E: whole requests, s",
}


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Writes a PNG. Needs no display."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    panels = list(axes.flat)
    for index, result in enumerate(results):
        color = COLORS[index % len(COLORS)]
        for axis, name in zip(panels[:4], TITLES, strict=True):
            _shares(axis, result, name, color)
        _over_time(panels[4], result, color, running=True)
        _over_time(panels[5], result, color, running=False)
    for axis, text in zip(panels, (*TITLES.values(), "Requests at once", "Output tokens/s"), strict=True):
        _dress(axis, text)
    for axis in panels[:4]:
        axis.set_ylim(0, 1.02)
        axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    for axis in panels[4:]:
        axis.set_xlabel("seconds", fontsize=8)
    handles, labels = panels[3].get_legend_handles_labels()
    if len(results) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(results)), frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _shares(axis: Any, result: Result, name: str, color: str) -> None:
    """The share of requests (or gaps) that took at most so long."""
    values = np.sort(result.latencies_s(name)) * (1.0 if name == "e2e" else 1e3)
    shares = np.arange(1, len(values) + 1) / max(len(values), 1)
    axis.step(values, shares, where="post", color=color, label=result.label)
    if bound := result.slo_ms.get(name):
        axis.axvline(bound / (1e3 if name == "e2e" else 1.0), color="#555", linestyle=":", linewidth=1)


def _over_time(axis: Any, result: Result, color: str, *, running: bool) -> None:
    """In 100 parts of the measured time. A request's tokens are spread evenly between its first and its last."""
    samples = [sample for sample in result.ok if sample.first_s is not None]
    end_s = max((sample.end_s for sample in samples), default=1.0)
    edges = np.linspace(0.0, end_s, 101)
    if running:
        starts = np.sort([sample.sent_s for sample in samples])
        ends = np.sort([sample.end_s for sample in samples])
        values = np.searchsorted(starts, edges, "right") - np.searchsorted(ends, edges, "right")
        axis.step(edges, values, where="post", color=color)
    else:
        tokens = np.zeros(len(edges))
        for sample in samples:
            assert sample.first_s is not None
            last_s = max(sample.last_s, sample.first_s + 1e-9)
            tokens += sample.num_output_tokens * np.clip((edges - sample.first_s) / (last_s - sample.first_s), 0, 1)
        axis.step(edges[:-1], np.diff(tokens) / np.diff(edges), where="post", color=color)


def _dress(axis: Any, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#ddd", linewidth=0.6)
    axis.tick_params(labelsize=8)

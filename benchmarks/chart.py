"""The picture of what offline.py measured: bars by system, one panel for each kind of figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from figures import Figures, label
from matplotlib.axes import Axes

COLORS = ("#c2410c", "#3b6ea5", "#7ba35a", "#8d8d96")
"""Ours first; then the peers."""


def draw(figures: Mapping[str, Figures], ours: str, path: Path) -> None:
    """Writes a PNG. Higher is better in the first two panels, lower in the last."""
    systems = sorted(figures, key=lambda name: name != ours)
    colors = dict(zip(systems, COLORS, strict=False))
    names = list(dict.fromkeys(name for each in figures.values() for name in each.tokens_per_s))
    prefill = [name for name in names if name.startswith("prefill")]
    output = [name for name in names if name.startswith("output")]

    widths = [max(len(prefill), 1), max(len(output), 1), 2]
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(12, 4.2), layout="constrained", gridspec_kw={"width_ratios": widths}
    )
    for axes, title, group in ((left, "Prefill, tokens/s", prefill), (middle, "Output, tokens/s", output)):
        values = {system: [figures[system].tokens_per_s.get(name) for name in group] for system in systems}
        _bars(axes, title, [label(name).split(", ")[1] for name in group], values, colors)
    startup = {system: [figures[system].cold_startup_s, figures[system].warm_startup_s] for system in systems}
    _bars(right, "Start-up, s (logarithmic)", ["empty caches", "filled caches"], startup, colors)
    right.set_yscale("log")

    handles, _ = middle.get_legend_handles_labels()
    legend = [f"{system} {figures[system].version}" for system in systems]
    figure.legend(handles, legend, loc="outside lower center", ncols=len(systems), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(
    axes: Axes,
    title: str,
    groups: Sequence[str],
    values: Mapping[str, Sequence[float | None]],
    colors: Mapping[str, str],
) -> None:
    width = 0.84 / len(values)
    for index, (system, heights) in enumerate(values.items()):
        at = [group + (index - (len(values) - 1) / 2) * width for group in range(len(groups))]
        bars = axes.bar(at, [h or float("nan") for h in heights], width * 0.92, color=colors[system], label=system)
        texts = ["" if h is None else f"{h:,.0f}" if h >= 10 else f"{h:.1f}" for h in heights]
        axes.bar_label(bars, texts, padding=2, fontsize=8)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.margins(y=0.12)

"""Curves, drawn by gnuplot (Debian's gnuplot-nox)."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MISSING = "gnuplot is missing, which draws the picture: apt-get install gnuplot-nox, or give --picture ''"


@dataclass
class Chart:
    """Curves of points; `logarithmic` names axes: x, y or xy."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    logarithmic: str = ""


def can_draw() -> bool:
    return shutil.which("gnuplot") is not None


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def draw(charts: Sequence[Chart], path: pathlib.Path) -> None:
    """All charts in one PNG, two in a row."""
    lines = (len(charts) + 1) // 2
    script = [
        f"set terminal pngcairo noenhanced background 'white' font 'sans,11' size 1500,{460 * lines}",
        f"set output {quoted(str(path))}",
        f"set multiplot layout {lines},{min(2, len(charts))}",
        "set grid; set key right bottom opaque; set style data linespoints; set pointsize 0.6",
    ]
    for chart in charts:
        for axis, label in (("x", chart.x), ("y", chart.y)):
            form = "%.0s%c" if "rows" in label else "%g"
            script.append(f"set {axis}label {quoted(label)}; set format {axis} {quoted(form)}")
        script += ["unset logscale", f"set title {quoted(chart.title)}", "set xrange [*:*]"]
        script += [f"set logscale {chart.logarithmic}"] if chart.logarithmic else []
        script += ["set yrange [*:*]" if "y" in chart.logarithmic else "set yrange [0:*]"]
        blocks = []
        for number, (name, points) in enumerate(chart.curves.items()):
            script += [f"$curve{number} << END", *(f"{x} {y}" for x, y in points), "END"]
            blocks.append(f"$curve{number} title {quoted(name)} linewidth 2")
        script.append(f"plot {', '.join(blocks)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gnuplot"], input="\n".join([*script, "unset multiplot", ""]), text=True, check=True)

"""Draws the tokens per step of docs/design/speculation.md, by task, into docs/pictures/acceptance.svg.

Run it as `python demo/acceptance_plot.py`.
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs/design/speculation.md", ROOT / "docs/pictures/acceptance.svg"
COLORS = ("#0072b2", "#e69f00", "#009e73", "#888888")  # distinguishable for colour-blind readers


def table() -> tuple[list[str], dict[str, list[float]]]:
    """Returns the names of the drafters, and by task the tokens per step with each drafter, in the order of the names.

    The numbers are from the table of docs/design/speculation.md. The tokens per step are the first number of a cell. The last
    column is not read, because it belongs to no drafter.
    """
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head = next(place for place, row in enumerate(rows) if row[0] == "task")
    found: dict[str, list[float]] = {}
    for task, *cells in rows[head + 2 :]:
        if len(cells) != len(rows[head]) - 1 or not re.match(r"\d", cells[0]):
            break
        found[task] = [float(cell.partition(",")[0]) for cell in cells[:-1]]
    return rows[head][1:-1], found


def main() -> None:
    names, found = table()
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    width = 0.8 / len(names)
    for place, (name, color) in enumerate(zip(names, COLORS, strict=True)):
        at = [task + (place - (len(names) - 1) / 2) * width for task in range(len(found))]
        axes.bar(at, [values[place] for values in found.values()], width, label=name, color=color)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(found)), found, rotation=30, ha="right")
    axes.set_ylim(0, 4)
    axes.set_ylabel("tokens a step")
    axes.legend(ncols=len(names), loc="upper left", frameon=False, bbox_to_anchor=(0, 1.14))
    axes.spines[["top", "right"]].set_visible(False)
    matplotlib.rcParams["svg.hashsalt"] = "acceptance"  # equal files for equal tables
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()

"""The page of a run for a browser, ``watch.html``: one file that needs no network, written anew while a run goes on."""

from __future__ import annotations

import html
import logging
import threading
import time
from collections.abc import Mapping, Sequence

from hpczero.files.durable import write_text
from hpczero.files.regular import reason
from hpczero.run.results.folder import RunFolder
from hpczero.run.view import GOOD, Picture, RunView

SHARE = 0.005  # of the run's time that the page may take
PATIENCE_S = 10.0  # for the last page, on a file system that hangs
WIDTH, HEIGHT, LEFT, BELOW = 460, 190, 64, 22  # of a plot
COLOURS = ("#1f77b4", "#d62728")

logger = logging.getLogger("hpczero.runs")

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;max-width:62rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.3rem;margin:0} h2{font-size:1rem;margin:1.6rem 0 .4rem} small{font-weight:400}
.state{padding:.6rem .9rem;border-radius:.4rem;border-left:.4rem solid #c62828;background:#c6282822}
.good{border-color:#2e7d32;background:#2e7d3222} #old{display:none}
table{border-collapse:collapse;width:100%} th{font-weight:600;white-space:nowrap}
td,th{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;border-bottom:1px solid #8886}
.plots{margin:1.4rem 0;display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1rem}
figure{margin:0} figcaption{font-weight:600} svg{width:100%;height:auto}
svg text{font-size:11px;fill:currentColor} polyline{fill:none;stroke-width:1.6}
"""

# A page that nobody writes any more cannot say so itself.
SCRIPT = """
const age=Date.now()/1e3-%f, old=document.getElementById("old");
if(age>%f){old.style.display="block";old.textContent="This page is "+Math.round(age/60)+" min old, and the run writes "+
"it every %g s. The run was killed, or stands still: python -m hpczero.watch says which."}
"""


def page_of(picture: Picture, every_s: float) -> str:
    """The page as text. ``every_s`` is how often it is written; 0: it will not be written again."""
    goes_on = picture.goes_on and every_s > 0
    refresh = f'<meta http-equiv="refresh" content="{max(every_s, 1):.0f}">' if goes_on else ""
    script = SCRIPT % (picture.when, max(60.0, 3 * every_s), every_s) if goes_on else ""
    path, state, said = map(html.escape, (str(picture.path), picture.state, picture.said))
    plots = (_figure(title, curves) for title, curves in picture.curves.items() if curves)
    starts = [("start", "ranks", "from", "how it ended"), *picture.starts]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">{refresh}
<title>{html.escape(picture.path.name)}: {state}</title><style>{STYLE}</style></head><body>
<h1>{path}</h1>
<p class="state {"good" if picture.state in GOOD else ""}"><b>{state}</b>: {said}</p>
<p class="state" id="old"></p>
{_table([*picture.figures.items()])}
<div class="plots">{"".join(plots)}</div>
{f"<h2>Starts</h2>{_table(starts, names=True)}" if picture.starts else ""}
{f"<h2>Warnings</h2>{_table(picture.notes)}" if picture.notes else ""}
<p><small>written {time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(picture.when))}</small></p>
<script>{script}</script></body></html>
"""


def _table(rows: Sequence[Sequence[str]], *, names: bool = False) -> str:
    """Rows whose first cell, or, with ``names``, whose first row names the others."""
    drawn = []
    for number, row in enumerate(rows):
        heads = len(row) * (number == 0) if names else 1
        kinds = ["th"] * heads + ["td"] * (len(row) - heads)
        cells = zip(kinds, map(html.escape, row), strict=True)
        drawn.append(f"<tr>{''.join(f'<{kind}>{cell}</{kind}>' for kind, cell in cells)}</tr>")
    return f"<table>{''.join(drawn)}</table>"


def _figure(title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Curves over the steps as SVG, with the least and the greatest of steps and values beside the axes."""
    steps, values = zip(*(point for points in curves.values() for point in points), strict=True)
    left, right, high = min(steps), max(steps), max(values)
    low = min(values) if title == "loss" else 0.0
    wide, tall = WIDTH - LEFT - 8, HEIGHT - BELOW - 8

    def place(step: float, value: float) -> tuple[float, float]:
        across, up = (step - left) / (right - left or 1), (value - low) / (high - low or 1)
        return LEFT + wide * across, 8 + tall * (1 - up)

    legend, drawn = [], []
    for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
        legend.append(f'<b style="color:{colour}">●</b> {html.escape(name)}')
        places = [f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points)]
        drawn.append(f'<polyline stroke="{colour}" points="{" ".join(places)}"/>')
        x, y = place(*points[-1])
        drawn.append(f'<circle fill="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
    for value in (low, (low + high) / 2, high):
        y = place(left, value)[1] + 4
        drawn.append(f'<text x="{LEFT - 6}" y="{y:.1f}" text-anchor="end">{_number(value)}</text>')
    return f"""<figure><figcaption>{html.escape(title)} <small>{" ".join(legend)}</small></figcaption>
<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(drawn)}
<path d="M{LEFT},8V{8 + tall}H{LEFT + wide}" fill="none" stroke="currentColor" opacity=".4"/>
<text x="{LEFT}" y="{HEIGHT - 4}">step {left:,.0f}</text>
<text x="{LEFT + wide}" y="{HEIGHT - 4}" text-anchor="end">{right:,.0f}</text></svg></figure>
"""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class PageWriter:
    """Context manager around a run: a thread of rank 0 writes ``watch.html``, now, every ``every_s``, and at the end.

    It waits longer where a page has taken more than ``SHARE`` of the time. A page that cannot be written is warned of
    once, and the run goes on without.
    """

    def __init__(self, folder: RunFolder, every_s: float) -> None:
        self._folder, self._every_s = folder, every_s
        self._view = RunView(folder)
        self._stop = threading.Event()
        # A daemon: where the file system hangs, the job ends all the same.
        self._thread = threading.Thread(target=self._run, name="hpczero-page", daemon=True)

    def __enter__(self) -> PageWriter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        try:
            write_page(self._folder, self._view.look(), self._every_s)
            wait_s = self._every_s  # of a long run the first look has much to read, once
            while True:
                self._stop.wait(wait_s)
                stops, begun = self._stop.is_set(), time.thread_time()
                write_page(self._folder, self._view.look(), self._every_s)
                if stops:
                    return
                wait_s = max(self._every_s, (time.thread_time() - begun) / SHARE)
        except OSError as error:
            logger.warning(
                "%s: cannot be written (%s); the run goes on without",
                self._folder.page,
                reason(error),
            )


def write_page(folder: RunFolder, picture: Picture, every_s: float) -> None:
    """Replace the page; a browser sees the old one or the new one, whole. Raises OSError."""
    write_text(folder.page, page_of(picture, every_s))

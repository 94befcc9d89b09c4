"""A timeline as one HTML page that needs nothing from anywhere, for clusters without a network."""

import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

__all__ = ["page"]


def page(records: Sequence[dict[str, Any]], table: str) -> str:
    """The ranks' collectives as bars that can be zoomed, and the table of who comes late below them.

    Args:
      records: as the flight recorder writes them, by rank.
      table: plain text.
    """
    names: dict[str, int] = {}
    bars = [
        [[names.setdefault(name, len(names)), bytes_, start, met, end] for _, name, bytes_, start, met, end in record["events"]]
        for record in records
    ]
    data = {"names": list(names), "bars": bars, "labels": [f"rank {record['rank']} on {record['host']}" for record in records]}
    text = json.dumps(data).replace("<", "\\u003c")  # no name may end the script
    parts = {"@TABLE@": escape(table), "@DATA@": text}
    return re.sub("@TABLE@|@DATA@", lambda match: parts[match[0]], _PAGE)  # at once: either part may hold the other's name


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>jaxmpi timeline</title>
<style>
  body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff }
  canvas { width: 100%; border: 1px solid #ccc; cursor: grab; display: block }
  pre { overflow-x: auto; background: #f6f6f6; padding: 1em } b { padding: 0 .5em; margin-right: .3em }
  #said { height: 3em; white-space: pre-line }
</style>
<h1>Collectives of each rank</h1>
<p><b style="background:#f0b26a"></b>waits for the others <b style="margin-left:1em;background:#3b76af"></b>all are there
<b style="margin-left:1em;border:1px solid #ccc"></b>computes. The wheel zooms, dragging moves, a double click shows all.</p>
<canvas id="c"></canvas><p id="said"></p><pre>@TABLE@</pre>
<script>
const data = @DATA@, c = document.getElementById("c"), said = document.getElementById("said"), g = c.getContext("2d");
const ROW = 30, LEFT = 170, all = data.bars.flat().flatMap(b => b.slice(2)).filter(t => t !== null);
const first = all.length ? all.reduce((a, b) => Math.min(a, b)) : 0;
const last = all.reduce((a, b) => Math.max(a, b), first + 1e-6), room = (last - first) * 0.01;
let from = first - room, to = last + room, grabbed = null;
const x = t => LEFT + (t - from) / (to - from) * (c.clientWidth - LEFT);
const t = px => from + (px - LEFT) / (c.clientWidth - LEFT) * (to - from);
const units = [[1, " s"], [1e-3, " ms"], [1e-6, " µs"]];
const span = s => { const [unit, name] = units.find(([u]) => s >= u) || units[2]; return (s / unit).toPrecision(4) + name; };
function draw() {
  const scale = window.devicePixelRatio || 1, height = ROW * data.bars.length + 24;
  c.style.height = height + "px"; c.width = c.clientWidth * scale; c.height = height * scale;
  g.setTransform(scale, 0, 0, scale, 0, 0); g.clearRect(0, 0, c.clientWidth, height); g.font = "13px system-ui, sans-serif";
  const third = (to - from) / 3, ten = 10 ** Math.floor(Math.log10(third)), step = third < 5 * ten ? ten : 5 * ten;
  for (let s = Math.ceil(from / step) * step; s < to; s += step) {
    g.fillStyle = "#ddd"; g.fillRect(x(s), 0, 1, height - 18);
    g.fillStyle = "#555"; g.fillText(+s.toPrecision(9) + " s", x(s) + 3, height - 6);
  }
  data.bars.forEach((bars, row) => {
    for (const [, , start, met, end] of bars) {
      const done = end ?? last, there = met ?? done;
      if (done < from || start > to) continue;
      for (const [a, b, color] of [[start, there, "#f0b26a"], [there, done, "#3b76af"]]) {
        const left = Math.max(LEFT, x(a)), right = Math.min(c.clientWidth, x(b));
        if (right <= LEFT || b <= a) continue;
        g.fillStyle = color; g.fillRect(left, row * ROW + 5, Math.max(0.7, right - left), ROW - 10);
      }
    }
    g.fillStyle = "#fff"; g.fillRect(0, row * ROW, LEFT - 1, ROW);
    g.fillStyle = "#222"; g.fillText(data.labels[row], 6, row * ROW + 20, LEFT - 12);
  });
}
c.onwheel = e => { e.preventDefault();
  const at = t(e.offsetX), k = Math.exp(e.deltaY / 400);
  if ((to - from) * k < 1e-7) return;
  from = at - (at - from) * k; to = at + (to - at) * k; draw(); };
c.onmousedown = e => { grabbed = e.offsetX; };
window.onmouseup = () => { grabbed = null; };
c.ondblclick = () => { from = first - room; to = last + room; draw(); };
c.onmousemove = e => {
  if (grabbed !== null) { const d = t(grabbed) - t(e.offsetX); from += d; to += d; grabbed = e.offsetX; draw(); }
  const row = Math.floor(e.offsetY / ROW), now = t(e.offsetX);
  const bar = (data.bars[row] || []).find(([, , start, , end]) => start <= now && now <= (end ?? last));
  said.textContent = "";
  if (!bar) return;
  const [name, bytes, start, met, end] = bar, then = met !== null && end !== null ? `, then ${span(end - met)}` : "";
  said.textContent = `${data.labels[row]}: ${data.names[name]}, ${bytes} bytes\\n` +
    `waited ${span((met ?? end ?? last) - start)}${then}`;
};
window.onresize = draw; draw();
</script></html>
"""

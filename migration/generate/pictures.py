"""Generate the pictures of README and guide as SVG: the quantized cell, the flow from FX to PT2E, one
boundary.

They have boxes on a grid and arrows between them; the colours follow the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import NamedTuple

STYLE = """\
  <style>
    text { font: 13px system-ui, sans-serif; fill: #1c2733; text-anchor: middle; }
    .small { font-size: 11px; fill: #5b6b7b; }
    .label { text-anchor: start; font-weight: bold; }
    .page { fill: #ffffff; stroke: none; }
    rect { stroke: #8795a3; fill: #f4f6f8; }
    .int rect { fill: #dcebf7; stroke: #1f77b4; }
    .float rect { fill: #f6ead9; stroke: #b7791f; }
    .frame rect { fill: none; stroke-dasharray: 5 4; }
    path { stroke: #5b6b7b; stroke-width: 1.4; fill: none; marker-end: url(#tip); }
    marker path { marker-end: none; fill: #5b6b7b; stroke: none; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e3e9ef; } .small { fill: #a9b8c6; }
      rect { fill: #1b242d; } .page { fill: #12181e; }
      .int rect { fill: #17344a; } .float rect { fill: #3a2d17; }
      path { stroke: #a9b8c6; } marker path { fill: #a9b8c6; }
    }
  </style>
  <defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0,0 L8,4 L0,8 z"/></marker></defs>
"""


class Box(NamedTuple):
    """A box: its centre, its lines of text, and the values in it: ``int``, ``float``, or neither. Without
    lines it is a ``frame`` around other boxes."""

    x: int
    y: int
    lines: tuple[str, ...]
    kind: str = ""
    width: int = 120
    height: int = 44


def pictures() -> Mapping[str, str]:
    """Return file name -> SVG."""
    return {"cell.svg": _cell(), "flow.svg": _flow(), "boundary.svg": _boundary()}


def _cell() -> str:
    boxes = {
        "x": Box(50, 60, ("x", "uint8"), "int", 76),
        "h": Box(50, 160, ("h", "uint8"), "int", 76),
        "c": Box(50, 300, ("c", "uint8"), "int", 76),
        "igates": Box(190, 60, ("igates", "W_ih x + b, int8 weight"), "int", 150),
        "hgates": Box(190, 160, ("hgates", "W_hh h + b, int8 weight"), "int", 150),
        "gates": Box(345, 110, ("gates", "the sum"), "int", 90),
        "input_gate": Box(490, 40, ("input_gate", "sigmoid"), "int"),
        "cell_gate": Box(490, 110, ("cell_gate", "tanh"), "int"),
        "forget_gate": Box(490, 180, ("forget_gate", "sigmoid"), "int"),
        "output_gate": Box(490, 380, ("output_gate", "sigmoid"), "int"),
        "igate_cgate": Box(650, 75, ("igate_cgate", "i * g"), "int"),
        "fgate_cx": Box(650, 240, ("fgate_cx", "f * c"), "int"),
        "c'": Box(810, 160, ("fgate_cx_igate_cgate", "the new c"), "int", 160),
        "tanh_cy": Box(810, 270, ("tanh_cy", "tanh"), "int"),
        "h'": Box(810, 380, ("ogate_cy", "the new h"), "int"),
    }
    arrows = (
        *(("x", "igates"), ("h", "hgates"), ("igates", "gates"), ("hgates", "gates")),
        *(
            ("gates", "input_gate"),
            ("gates", "cell_gate"),
            ("gates", "forget_gate"),
            ("gates", "output_gate"),
        ),
        *(("input_gate", "igate_cgate"), ("cell_gate", "igate_cgate"), ("forget_gate", "fgate_cx")),
        *(("c", "fgate_cx"), ("igate_cgate", "c'"), ("fgate_cx", "c'"), ("c'", "tanh_cy")),
        *(("tanh_cy", "h'"), ("output_gate", "h'")),
    )
    title = "One step of a quantized LSTM: every box is observed, and quantized after conversion"
    return _svg(900, 420, title, boxes, arrows)


def _flow() -> str:
    boxes = {
        "prepare": Box(345, 205, (), "frame", 360, 165),
        "convert": Box(755, 205, (), "frame", 160, 165),
        "model": Box(80, 55, ("float model", "nn.LSTM, nn.Linear")),
        "fx1": Box(345, 55, ("symbolic trace", "observers, LSTM swapped"), width=170),
        "fx2": Box(600, 55, ("your data", "for the observers")),
        "fx3": Box(755, 55, ("torch.ao kernels", "x86 and ARM"), width=130),
        "model2": Box(80, 205, ("float model", "the same")),
        "e": Box(245, 175, ("torch.export", "every size free"), width=130),
        "c": Box(245, 245, ("custom modules", "one opaque call each"), "int", 140),
        "p": Box(440, 205, ("prepare_pt2e", "torchao's observers"), width=130),
        "d": Box(600, 205, ("your data", "the same")),
        "q": Box(755, 175, ("convert_pt2e", "q-dq graph"), width=130),
        "k1": Box(755, 245, ("integer kernels", "x86"), "int", 130),
        "k2": Box(935, 175, ("export, to_onnx", "torch.export, ONNX"), "int", 140),
        "k3": Box(935, 245, ("to_executorch", "ExecuTorch"), "int", 140),
    }
    arrows = (
        *(("model", "fx1"), ("fx1", "fx2"), ("fx2", "fx3"), ("model2", "e"), ("model2", "c"), ("e", "p")),
        *(("c", "p"), ("p", "d"), ("d", "q"), ("q", "k1"), ("q", "k2"), ("q", "k3")),
    )
    labels = (
        *((20, 22, "FX"), (260, 22, "prepare_fx"), (540, 22, "calibrate"), (690, 22, "convert_fx")),
        *((20, 142, "here"), (172, 142, "prepare_fx"), (540, 142, "calibrate"), (682, 142, "convert_fx")),
        (865, 288, "blue: torchq_compat"),
    )
    return _svg(1020, 305, "The same calls, on FX and on PT2E", boxes, arrows, labels)


def _boundary() -> str:
    boxes = {
        "a": Box(80, 80, ("linear", "its result: uint8"), "int"),
        "dq": Box(230, 80, ("quantized once", "scale, zero point"), "int"),
        "l": Box(420, 80, ("LSTM", "one opaque call"), "int", 150, 110),
        "o": Box(620, 40, ("output", "dequantized once"), "float", 140),
        "s": Box(620, 120, ("h, c", "dequantized if used"), "float", 140),
        "n": Box(790, 40, ("log_softmax", "stays float"), "float"),
    }
    arrows = (("a", "dq"), ("dq", "l"), ("l", "o"), ("l", "s"), ("o", "n"))
    return _svg(870, 170, "What happens at the boundary of a custom module", boxes, arrows)


def _svg(
    width: int,
    height: int,
    title: str,
    boxes: Mapping[str, Box],
    arrows: tuple[tuple[str, str], ...],
    labels: tuple[tuple[int, int, str], ...] = (),
) -> str:
    # The background keeps text readable on pages that do not follow the reader's setting.
    lines = [f'  <rect class="page" x="0" y="0" width="{width}" height="{height}" rx="8"/>']
    lines += [_box(box) for box in boxes.values() if not box.lines]
    lines += [_arrow(boxes[start], boxes[end]) for start, end in arrows]
    lines += [_box(box) for box in boxes.values() if box.lines]
    lines += [f'  <text class="label" x="{x}" y="{y}">{escape(text)}</text>' for x, y, text in labels]
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(title)}">\n'
        f"  <title>{escape(title)}</title>\n{STYLE}{body}\n</svg>\n"
    )


def _box(box: Box) -> str:
    left, top = box.x - box.width / 2, box.y - box.height / 2
    first, *more = box.lines or ("",)
    texts = [f'<text x="{box.x}" y="{box.y - 2}">{escape(first)}</text>'] if first else []
    texts += [
        f'<text class="small" x="{box.x}" y="{box.y + 14 + 14 * index}">{escape(line)}</text>'
        for index, line in enumerate(more)
    ]
    rect = f'<rect x="{left:g}" y="{top:g}" width="{box.width}" height="{box.height}" rx="6"/>'
    return f'  <g class="{box.kind or "plain"}">{rect}{"".join(texts)}</g>'


def _arrow(start: Box, end: Box) -> str:
    if abs(start.x - end.x) < 10:
        y = start.y + start.height / 2 if end.y > start.y else start.y - start.height / 2
        to = end.y - end.height / 2 if end.y > start.y else end.y + end.height / 2
        return f'  <path d="M{start.x},{y:g} L{end.x},{to:g}"/>'
    x, to_x = start.x + start.width / 2, end.x - end.width / 2
    to_y = max(min(start.y, end.y + end.height / 2 - 8), end.y - end.height / 2 + 8)
    y = (
        start.y
        if abs(end.y - start.y) > start.height / 2
        else max(min(to_y, start.y + start.height / 2 - 8), start.y - start.height / 2 + 8)
    )
    middle = (x + to_x) / 2
    return f'  <path d="M{x:g},{y:g} C{middle:g},{y:g} {middle:g},{to_y:g} {to_x:g},{to_y:g}"/>'

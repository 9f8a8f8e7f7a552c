"""Writes the drawings of docs/ to docs/drawings/*.svg; `--check` only compares them with the files.

overlap.svg is drawn from a recorded training step, docs/drawings/overlap.json. `--record` trains two ranks and writes
that file anew; everything else is drawn from this script. The drawings carry their own background, light or dark as
the reader's system asks, so they are readable on any page. They are at most 480 units wide, since on a phone a page has
about 350.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "drawings"
RECORD = FOLDER / "overlap.json"

# Each class of shapes with its colours in light and in dark.
STYLE = """<style>
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1b1f24 }
.small { font-size: 11px; fill: #57606a } .bold { font-weight: 600 } .on { fill: #ffffff; font-weight: 600 }
.back { fill: #ffffff } .panel { fill: #f3f5f8; stroke: #c3cad3 } .node { fill: #dce9f9; stroke: #2f6fb7 }
.forward { fill: #c7ced8 } .backward { fill: #8d99a8 } .operation { fill: #2f6fb7 } .peer { fill: #a9c8ec }
.exposed { fill: #d9822b } .axis { stroke: #8d99a8 } .store { fill: #fdeed9; stroke: #d9822b }
.arrow { stroke: #2f6fb7; stroke-width: 1.8; fill: none } .head { fill: #2f6fb7 }
.other { stroke: #d9822b; stroke-width: 1.8; fill: none } .otherhead { fill: #d9822b }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ed } .small { fill: #a4adb8 } .on { fill: #ffffff }
  .back { fill: #16191d } .panel { fill: #20252b; stroke: #48515c } .node { fill: #1f3a5c; stroke: #6ba4e6 }
  .forward { fill: #4a535f } .backward { fill: #6f7b8a } .peer { fill: #294a73 }
  .axis { stroke: #6f7b8a } .store { fill: #4a3318; stroke: #d9822b }
  .arrow { stroke: #6ba4e6 } .head { fill: #6ba4e6 } .operation { fill: #3a7bc8 }
}
</style>"""


class Drawing:
    """An SVG of the given width and height, to which shapes are added in the order in which they cover each other."""

    def __init__(self, width, height, title):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            f"<title>{title}</title>",
            STYLE,
            f'<rect class="back" width="{width}" height="{height}" rx="6"/>',
        ]

    def box(self, x, y, width, height, kind, radius=4):
        self.parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"/>'
        )

    def text(self, x, y, text, kind="", anchor="start"):
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>')

    def label(self, x, y, width, height, kind, *lines):
        """A box with lines of text in its middle: the first as it is, the others small."""
        self.box(x, y, width, height, kind)
        top = y + height / 2 + 5 - 7 * (len(lines) - 1)
        for index, line in enumerate(lines):
            self.text(x + width / 2, top + 14 * index, line, "small" if index else "", "middle")

    def caption(self, *lines):
        """Small lines under a drawing that is 236 wide."""
        for index, line in enumerate(lines):
            self.text(118, 200 + 16 * index, line, "small", "middle")

    def line(self, x1, y1, x2, y2, kind):
        self.parts.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def arrow(self, x1, y1, x2, y2, kind="arrow", both=False):
        """A straight arrow to (x2, y2), and with `both` also one to (x1, y1)."""
        self.line(x1, y1, x2, y2, kind)
        head = "head" if kind == "arrow" else "otherhead"
        for x, y, angle in [
            (x2, y2, math.atan2(y2 - y1, x2 - x1)),
            *([(x1, y1, math.atan2(y1 - y2, x1 - x2))] if both else []),
        ]:
            corners = [(x, y)] + [(x - 9 * math.cos(angle + s), y - 9 * math.sin(angle + s)) for s in (-0.42, 0.42)]
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
            self.parts.append(f'<polygon class="{head}" points="{points}"/>')

    def svg(self):
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def overlap(record):
    """Returns the drawing of one recorded step: what each rank computes, and when its buckets are reduced."""
    d = Drawing(480, 342, "One training step of two ranks on an axis of time")
    left, right = 72, 448
    begin = min(event["ts"] for rank in record["ranks"] for event in rank)
    end = max(event["ts"] + event["dur"] for rank in record["ranks"] for event in rank)
    scale = (right - left) / (end - begin)
    at = lambda ts: left + (ts - begin) * scale  # noqa: E731

    operations = [{e["name"]: e for e in rank if e["cat"] == "operations"} for rank in record["ranks"]]
    for index, rank in enumerate(record["ranks"]):
        y = 14 + 118 * index
        d.text(14, y + 13, f"rank {index}", "bold")
        d.text(14, y + 44, "compute", "small")
        d.text(14, y + 84, "buckets", "small")
        for event in rank:
            x, width = at(event["ts"]), event["dur"] * scale
            name = event["name"].split()[0]
            if event["cat"] == "compute":
                kind = "backward" if name == "backward" else "forward"
                d.box(x, y + 28, width, 24, kind, 2)
                if width > 60:
                    d.text(x + width / 2, y + 45, name, "on" if kind == "backward" else "", "middle")
            elif event["cat"] == "waits (exposed communication)":
                d.box(x, y + 28, width, 24, "exposed", 2)
            elif event["cat"] == "operations":
                met = max(o[event["name"]]["ts"] for o in operations)  # both ranks are in the operation from here on
                early = max(0.0, min(met - event["ts"], event["dur"])) * scale
                d.box(x, y + 68, early, 24, "peer", 2)
                d.box(x + early, y + 68, width - early, 24, "operation", 2)
                d.text(x + (early + width) / 2, y + 85, event["name"].split()[1], "on", "middle")
            elif event["cat"] == "buckets ready":
                d.arrow(x, y + 53, x, y + 67)
    y = 254
    d.line(left, y, right, y, "axis")
    step = 20_000
    for tick in range(0, int(end - begin) + 1, step):
        x = at(begin + tick)
        d.line(x, y, x, y + 5, "axis")
        d.text(x, y + 18, f"{tick // 1000} ms" if tick else "0", "small", "middle")
    legend = [
        ("operation", "a bucket is reduced"),
        ("peer", "waits for the other rank"),
        ("exposed", "backward has to wait: exposed"),
    ]
    for index, (kind, text) in enumerate(legend):
        x, y = 14 + 232 * (index % 2), 288 + 22 * (index // 2)
        d.box(x, y, 14, 14, kind, 2)
        d.text(x + 20, y + 11, text, "small")
    d.arrow(253, 308, 253, 324)
    d.text(266, 321, "a bucket's gradients are there", "small")
    return d.svg()


def node(d, x, y, text):
    d.box(x - 21, y - 13, 42, 26, "node", 13)
    d.text(x, y + 5, text, "", "middle")


def ring():
    """Returns the drawing of a ring of four ranks."""
    d = Drawing(236, 250, "Ring all-reduce of four ranks")
    d.text(118, 22, "Ring", "bold", "middle")
    corners = [(55, 60), (181, 60), (181, 160), (55, 160)]
    for index, (x, y) in enumerate(corners):
        x2, y2 = corners[(index + 1) % 4]
        pad_x, pad_y = 27 * ((x2 > x) - (x2 < x)), 19 * ((y2 > y) - (y2 < y))
        d.arrow(x + pad_x, y + pad_y, x2 - pad_x, y2 - pad_y)
        node(d, x, y, str(index))
    d.caption("2 (n-1) steps. In each, a rank", "passes 1/n of the tensor on:", "sums first, then results")
    return d.svg()


def two_shot():
    """Returns the drawing of a two-shot all-reduce: what happens to the block of rank 2."""
    d = Drawing(236, 250, "Two-shot all-reduce of four ranks, seen from the block of rank 2")
    d.text(118, 22, "Two-shot", "bold", "middle")
    xs = [34, 90, 146, 202]
    for index, x in enumerate(xs):
        if index != 2:
            d.arrow(x, 66, 146 + (-14 if index < 2 else 14), 94 if index != 1 else 92)
            d.arrow(146 + (-14 if index < 2 else 14), 122, x, 146, "other")
        node(d, x, 52, str(index))
        node(d, x, 162, str(index))
    d.box(118, 94, 56, 28, "store", 4)
    d.text(146, 113, "sum", "", "middle")
    d.arrow(146, 66, 146, 93)
    d.arrow(146, 123, 146, 148, "other")
    d.caption(
        "2 steps. Rank 2 gets block 2 of all", "and adds it, then sends the sum", "to all; the others do so with theirs"
    )
    return d.svg()


def hierarchical():
    """Returns the drawing of a hierarchical all-reduce of two hosts with two ranks each."""
    d = Drawing(236, 250, "Hierarchical all-reduce of two hosts with two ranks each")
    d.text(118, 22, "Hierarchical", "bold", "middle")
    for host, x in enumerate((12, 136)):
        d.box(x, 36, 88, 136, "panel", 6)
        d.text(x + 44, 53, f"host {host}", "small", "middle")
        node(d, x + 44, 78, str(2 * host))
        node(d, x + 44, 146, str(2 * host + 1))
        d.arrow(x + 38, 132, x + 38, 92)
        d.arrow(x + 50, 92, x + 50, 132)
        d.text(x + 30, 117, "1", "small", "end")
        d.text(x + 58, 117, "3", "small")
    d.arrow(78, 78, 158, 78, "other", both=True)
    d.text(118, 70, "2", "small", "middle")
    d.caption(
        "1 reduce in each host, 2 all-reduce",
        "of one rank per host, the only one",
        "on the network, 3 broadcast in each",
    )
    return d.svg()


def federated():
    """Returns the drawing of a federated program: server, clients and the verbs between them."""
    d = Drawing(480, 300, "A federated program: the server, its clients, and the verbs between them")
    d.label(130, 16, 220, 44, "store", "server value: x", "one tensor, shape [...]")
    for index, x in enumerate((20, 175, 330)):
        d.box(x, 138, 130, 66, "node", 6)
        d.text(x + 65, 158, f"client {index}", "bold", "middle")
        d.text(x + 65, 176, "map_fn(fn)", "", "middle")
        d.text(x + 65, 193, f"fn(x, y[{index}])", "small", "middle")
        d.arrow(205 + 22 * index, 62, x + 40, 136)
        d.arrow(x + 90, 136, 231 + 22 * index, 62, "other")
    d.text(14, 92, "broadcast", "bold")
    d.text(466, 84, "reduce_sum", "bold", "end")
    d.text(466, 100, "reduce_mean", "bold", "end")
    d.text(240, 226, "placed values: an axis of clients, shape [clients, ...]", "small", "middle")
    d.line(20, 240, 460, 240, "axis")
    d.text(240, 262, "The derivative is such a program too: of broadcast it is", "small", "middle")
    d.text(240, 280, "reduce_sum, of reduce_sum it is broadcast", "small", "middle")
    return d.svg()


def ports():
    """Returns the drawing of the processes of a job on two hosts, and what each listens on."""
    d = Drawing(480, 392, "What listens where, in a job of two hosts with two ranks each")
    for host, y in enumerate((10, 212)):
        d.box(10, y, 460, 170, "panel", 6)
        y_of_ranks = (116, 246)[host]
        for x, rank in ((22, 2 * host), (222, 2 * host + 1)):
            d.label(x, y_of_ranks, 160, 50, "node", f"rank {rank}", "a TCP port, a Unix socket")
        d.arrow(184, y_of_ranks + 25, 220, y_of_ranks + 25, both=True)
        d.text(202, y_of_ranks + 17, "shm", "small", "middle")
    d.text(22, 30, "host A: HOST of --rdzv-endpoint, with rank 0", "bold")
    d.label(
        22, 42, 436, 50, "store", "bagua run: two stores of torch", "at HOST:29500, and at MASTER_PORT, a free port"
    )
    d.text(22, 232, "host B", "bold")
    d.label(22, 320, 436, 50, "panel", "bagua run", "listens on nothing; it and its ranks dial the stores")
    for x in (102, 302):
        d.arrow(x, 114, x, 94, "other")
        d.arrow(x, 244, x, 168, both=True)
    d.arrow(422, 318, 422, 94, "other")
    d.text(314, 201, "TCP, any pair", "small")
    return d.svg()


def train(rank, world_size, folder):
    """Trains a small network with bytegrad for a few steps; rank 1 has larger batches."""
    import torch

    import bagua

    torch.set_num_threads(1)
    torch.manual_seed(0)
    bagua.init_process_group()
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024, bias=False), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = bagua.with_bagua(model, optimizer, algorithm="bytegrad", bucket_bytes=4 << 20)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(96 + 32 * rank, 1024)).square().mean().backward()
        optimizer.step()
    model.bagua.save_timeline(folder)
    bagua.destroy_process_group()


def record():
    """Trains two ranks over TCP, as on two hosts, and writes the shortest step of their timelines."""
    from bagua.testing import spawn

    tracks = ("compute", "waits (exposed communication)", "operations", "buckets ready")
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, 2, args=(folder,), nodes=2, timeout=100)
        for rank in range(2):
            events = json.loads((Path(folder) / f"rank{rank}.json").read_text())["traceEvents"]
            steps = [event for event in events if event.get("cat") == "steps"]
            if rank == 0:  # the step that the rest of this machine disturbed least; the first ones are warm-up
                shortest = min(range(3, len(steps)), key=lambda index: steps[index]["dur"])
            begin, end = steps[shortest]["ts"], steps[shortest]["ts"] + steps[shortest]["dur"]
            inside = [e for e in events if e.get("cat") in tracks and begin <= e["ts"] <= end]
            ranks.append([{k: e.get(k, 0) for k in ("cat", "name", "ts", "dur")} for e in inside])
    origin = min(event["ts"] for rank in ranks for event in rank)
    for event in (event for rank in ranks for event in rank):
        event["ts"] = round(event["ts"] - origin, 1)
        event["dur"] = round(event["dur"], 1)
    lines = [",\n".join("    " + json.dumps(event) for event in rank) for rank in ranks]
    RECORD.write_text('{"ranks": [\n  [\n' + "\n  ],\n  [\n".join(lines) + "\n  ]\n]}\n")


def main():
    """Draws everything; returns 1 if `--check` finds a file that differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="first train two ranks and record a step")
    parser.add_argument("--check", action="store_true", help="only compare with the files")
    arguments = parser.parse_args()
    if arguments.record:
        record()
    drawings = {
        "overlap": overlap(json.loads(RECORD.read_text())),
        "ring": ring(),
        "two_shot": two_shot(),
        "hierarchical": hierarchical(),
        "federated": federated(),
        "ports": ports(),
    }
    for name, svg in drawings.items():
        path = FOLDER / f"{name}.svg"
        if not arguments.check:
            path.write_text(svg)
        elif not path.exists() or path.read_text() != svg:
            print(f"{path.relative_to(ROOT)} is not what scripts/draw.py draws: run python scripts/draw.py")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

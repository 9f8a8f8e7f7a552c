"""Does training with bagua converge as torch DDP does?

Runs examples/byte_lm.py (a byte-level transformer) on 2 ranks with DDP, gradient_allreduce and bytegrad, the same
data, seeds and first weights for all, and plots the loss curves in one picture.

    python benchmarks/convergence_curves.py [--epochs 3] [--seeds 0 1 2] [--quick]
"""

from __future__ import annotations

import csv
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import ranks
import report

DDP = "ddp"
ALGORITHMS = (DDP, "gradient_allreduce", "bytegrad")
EXAMPLE = report.ROOT / "examples" / "byte_lm.py"
_SMOOTHED_STEPS = 15
_WIDTHS = (5.0, 2.5, 1.0)  # the curves lie on each other


def train(algorithm: str, num_ranks: int, epochs: int, seed: int, folder: Path) -> dict[str, list[tuple[int, float]]]:
    """One run of the example; (step, loss) for training and validation."""
    path = folder / f"{algorithm}-{seed}.csv"
    command = [sys.executable, "-m", "bagua.run", "--nproc-per-node", str(num_ranks), str(EXAMPLE)]
    command += ["--algorithm", algorithm, "--epochs", str(epochs), "--seed", str(seed), "--loss-csv", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, cwd=report.ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    with path.open() as file:
        lines = list(csv.DictReader(file))
    curve = {
        kind: [(int(line["step"]), float(line[kind])) for line in lines if line[kind]]
        for kind in ("train_loss", "validation_loss")
    }
    if not all(math.isfinite(loss) for points in curve.values() for _, loss in points):
        raise RuntimeError(f"{algorithm}, seed {seed}: the loss is not finite")
    return curve


def plot(axis, curves: dict[str, list[dict]]) -> None:
    """Training loss, a running mean, of the first seed; validation loss of every seed as points."""
    for number, (algorithm, runs) in enumerate(curves.items()):
        points = runs[0]["train_loss"]
        losses = [loss for _, loss in points]
        smooth = [
            sum(losses[max(0, i - _SMOOTHED_STEPS + 1) : i + 1]) / min(i + 1, _SMOOTHED_STEPS)
            for i in range(len(losses))
        ]
        axis.plot(
            [step for step, _ in points], smooth, color=f"C{number}", lw=_WIDTHS[number], label=f"{algorithm}, training"
        )
        for run in runs:
            axis.plot(*zip(*run["validation_loss"], strict=True), "o", color=f"C{number}", ms=5, mfc="none")
    axis.plot([], [], "o", color="0.4", mfc="none", label="validation, one per seed")
    axis.set_xlabel("step")
    axis.set_ylabel("nats per byte")
    axis.set_title("byte_lm")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    seeds = args.seeds[:1] if args.quick else args.seeds
    setup = {"runs": f"{args.ranks} ranks, {args.epochs} epochs, seeds {', '.join(map(str, seeds))}"}
    result = report.Report(__file__, "loss curves beside DDP", args, setup)
    curves: dict[str, list[dict]] = {algorithm: [] for algorithm in ALGORITHMS}
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        for seed in seeds:
            for algorithm in ALGORITHMS:
                curves[algorithm].append(train(algorithm, args.ranks, args.epochs, seed, Path(folder)))

    rows: list[report.Row] = []
    for algorithm, runs in curves.items():
        final = [run["validation_loss"][-1][1] for run in runs]
        rows.append(report.Row(algorithm, final, rows[0] if rows else None))
        differences = [
            abs(mine - theirs)
            for run, reference in zip(runs, curves[DDP], strict=True)
            for (_, mine), (_, theirs) in zip(run["train_loss"], reference["train_loss"], strict=True)
        ]
        rows[-1].cells = {"mean distance of the training loss to DDP's": f"{sum(differences) / len(differences):.2g}"}
    notes = ["One sample per seed; ratio: the case's median over DDP's."]
    result.add(report.Table("Final validation loss", rows, unit="nats/byte", ratio="relative", notes=notes))
    figure, axes = report.subplots(1)
    plot(axes[0], curves)
    result.write(figure)


if __name__ == "__main__":
    ranks.main(lambda: None, main)

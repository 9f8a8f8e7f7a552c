"""Measures how soon each method reaches DDP's loss across a slow link: a byte-level transformer on four ranks.

Two parts. The losses are those of a real training, over loopback, where every method gets the same number of tokens in
each step, and the same batches: those on held-out text by step, of the mean of all ranks' weights. The first steps
average gradients under every method, as the papers do before they begin, and count for none. The learning rate
then stays as it is, so that a method that has not reached DDP's loss by its last step trains on, for as many steps
again at most. The times are those of a larger model of the same kind, of eleven million parameters, on four hosts with
links of a given rate, played by `bagua bench replay`: real tensors and real communication, and a sleep instead of
compute, since the machine has fewer cores than ranks. The time to a loss is the number of steps to it times the median
of a step.

    sudo .venv/bin/python -m benchmarks.training.time_to_loss [--steps 600] [--rates 1000 100 20] [--quick]

DDP is torch's, on gloo, with gradients sent in bfloat16. Of the time a share computes: compute alone over the step. At
most it is the share that the bytes allow at the rate of the link, less what `overlap_steps` of them hide.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib import ranks, report

BASELINE, DEMO = "ddp_bf16", "demo:momentum_decay=0.95"
H30 = "diloco:sync_every=30,outer_momentum=0.6"
STREAMED = "diloco:sync_every=32,outer_momentum=0.6,fragments=4,overlap_steps=5,codec=fp4_e3m0"
SPARSE = "sparseloco:sync_every=30,outer_lr=0.8"
# Written for `bagua bench replay`.
SYSTEMS = (
    BASELINE,
    "bytegrad",
    "qsgd:bits=4",
    "local_sgd:sync_every=16",
    H30,
    "diloco:sync_every=100,outer_momentum=0.6",
    STREAMED,
    SPARSE,
    DEMO,
)
SEEDED = (BASELINE, H30, STREAMED, SPARSE)  # with all seeds; the others with the first
NUM_RANKS, WINDOWS, LR, START, RISING = 4, 4, 0.003, 400, 50  # the last: steps of the rate's rise, of those before
TRAINED, TIMED = (128, 3), (384, 6)  # width and depth
EVERY, HELD_OUT = 20, 64  # steps from one look at the loss to the next, and windows of held-out text


def _byte_lm() -> Any:
    sys.path.insert(0, str(report.ROOT / "examples"))
    import byte_lm

    return byte_lm


def measure(system: str, seed: int, start: int, num_steps: int, until: float | None) -> dict[str, Any]:
    """Trains on a rank; returns the held-out loss by step, to `num_steps` or until it is at most `until`, if later."""
    import torch

    import bagua
    from bagua.replay.systems import initialise, parse

    initialise()
    byte_lm = _byte_lm()
    train, held_out = byte_lm.load_text(4_000_000)
    held_out = byte_lm.windows(held_out, torch.linspace(0, len(held_out) - byte_lm.CONTEXT - 1, HELD_OUT).long())
    torch.manual_seed(seed)
    model = byte_lm.ByteTransformer(*TRAINED)
    generator = torch.Generator().manual_seed(1000 * seed + bagua.get_rank())

    def step(trained: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        starts = torch.randint(len(train) - byte_lm.CONTEXT, (WINDOWS,), generator=generator)
        byte_lm.loss_of(trained, byte_lm.windows(train, starts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    bagua.with_bagua(model, optimizer)
    for index in range(start):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (index + 1) / RISING)
        step(model, optimizer)
    model.bagua.remove()
    name, options = parse(system)
    if system == DEMO:  # has a momentum of its own
        optimizer = torch.optim.AdamW(model.parameters(), lr=2 / 3 * LR, betas=(0.0, 0.95))
    trained = _wrap(model, optimizer, name, options)
    losses: dict[int, float] = {}
    for index in range(EVERY, 2 * num_steps + 1, EVERY):
        for _ in range(EVERY):
            step(trained, optimizer)
        whole = model if name == BASELINE else bagua.average_model(model)
        if bagua.get_rank() == 0:
            with torch.no_grad():
                losses[index] = float(byte_lm.loss_of(whole, held_out))
        is_reached = until is None or losses.get(index, 0.0) <= until
        if index >= num_steps and bagua.get_default_group().broadcast_plain(is_reached, 0):
            break
    if name != BASELINE:
        model.bagua.remove()
    bagua.destroy_process_group()
    torch.distributed.destroy_process_group()
    return {"losses": losses}


def _wrap(model: Any, optimizer: Any, name: str, options: dict[str, Any]) -> Any:
    import torch

    import bagua
    from bagua.replay.systems import HOOKS

    if name not in HOOKS:
        return bagua.with_bagua(model, optimizer, algorithm=name, **options)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, HOOKS[name]())
    return wrapped


def _write_profile(step_ms: float, path: Path) -> None:
    """Writes the profile of the model, whose steps take as long; a third of a step is forward."""
    from bagua.replay.profiles import Layer, Profile

    model = _byte_lm().ByteTransformer(*TIMED)
    parts = {"embedding": [model.embedding.weight, model.position]}
    parts |= {f"layer {index}": list(layer.parameters()) for index, layer in enumerate(model.layers.layers)}
    parts["head"] = [*model.norm.parameters(), *model.head.parameters()]
    total = sum(parameter.numel() for tensors in parts.values() for parameter in tensors)
    layers = []
    for name, tensors in parts.items():
        ms = step_ms * sum(tensor.numel() for tensor in tensors) / total
        layers.append(Layer(name, tuple(tuple(tensor.shape) for tensor in tensors), ms / 3, 2 * ms / 3))
    Profile("byte_transformer", f"benchmarks/training/time_to_loss.py, {step_ms:g} ms a step", tuple(layers)).save(path)


def _utilisation_bound(outcome: Any, options: dict[str, Any]) -> float:
    """Returns the largest share of the time that can compute, for these bytes on this link."""
    import bagua
    from bagua.replay.hosts import BURST_BYTES

    if not options.get("overlap_steps"):
        return min(1.0, outcome.compute_s / outcome.bound_s)
    named = list(_byte_lm().ByteTransformer(*TIMED).named_parameters())
    sizes = [parameter.nbytes for _, parameter in named]
    algorithm = bagua.algorithms.create("diloco", options)
    fragment_of = algorithm.fragments_of([name for name, _ in named], sizes)
    sent_bytes, hidden_s = outcome.wire_bytes * options["sync_every"], options["overlap_steps"] * outcome.compute_s
    waiting_s = 0.0
    for fragment in range(options["fragments"]):
        part = sum(size for size, of in zip(sizes, fragment_of, strict=True) if of == fragment) / sum(sizes)
        exchange_s = max(0.0, part * sent_bytes - BURST_BYTES) * 8 / (outcome.case.rate_mbit * 1e6)
        waiting_s += max(0.0, exchange_s - hidden_s)
    computing_s = options["sync_every"] * outcome.compute_s
    return computing_s / (computing_s + waiting_s)


def _train_all(start: int, num_steps: int, num_seeds: int) -> dict[tuple[str, int], dict[int, float]]:
    """Returns the losses by step, by system and seed; prints each as it comes, to stderr."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for seed, system in itertools.product(range(num_seeds), SYSTEMS):
        if seed and system not in SEEDED:
            continue
        until = found[BASELINE, seed][num_steps] if system != BASELINE else None
        options = {"system": system, "seed": seed, "start": start, "num_steps": num_steps, "until": until}
        env = {"OMP_NUM_THREADS": "1"}
        losses = ranks.run(NUM_RANKS, options, env=env, timeout_s=900)[0]["losses"]
        found[system, seed] = {int(step): loss for step, loss in losses.items()}
        print(json.dumps({"system": system, "seed": seed, "losses": losses}), file=sys.stderr, flush=True)
    return found


def _steps_to(losses: dict[int, float], loss: float) -> int | None:
    return next((step for step, value in losses.items() if value <= loss), None)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 100, 20], help="Mbit/s of every host's link")
    parser.add_argument("--step-ms", type=float, default=50.0, help="of compute, when times are taken")
    args = parser.parse_args()
    start, num_steps, num_seeds = (20, 40, 1) if args.quick else (START, args.steps, args.seeds)
    if num_steps < EVERY or num_steps % EVERY:
        parser.error(f"--steps is {num_steps}, expected a multiple of {EVERY}")
    report.need_hosts("time_to_loss")
    from bagua.replay.cases import Case
    from bagua.replay.command import play
    from bagua.replay.systems import parse

    setup = {"ranks": NUM_RANKS, "tokens per step": NUM_RANKS * WINDOWS * 64, "steps": f"{start} and {num_steps}"}
    setup |= {"seeds": num_seeds, "width and depth": f"{TRAINED} trained, {TIMED} timed"}
    result = report.Report(__file__, "time to DDP's loss across slow links", args, setup)
    found = _train_all(start, num_steps, num_seeds)
    aims = {seed: found[BASELINE, seed][num_steps] for seed in range(num_seeds)}
    cells = [["method", "loss at equal tokens, by seed", "over DDP's", "steps to DDP's loss"]]
    steps: dict[str, list[int | None]] = {}
    for system in SYSTEMS:
        of_seeds = {seed: losses for (name, seed), losses in found.items() if name == system}
        over = statistics.mean(losses[num_steps] / aims[seed] - 1 for seed, losses in of_seeds.items())
        steps[system] = to = [_steps_to(losses, aims[seed]) for seed, losses in of_seeds.items()]
        shown = ", ".join(f"{losses[num_steps]:.3f}" for losses in of_seeds.values())
        cells.append([system, shown, f"{over:+.1%}", ", ".join(str(one or f"> {2 * num_steps}") for one in to)])
    result.say("### Losses", "", *report.aligned(cells))
    for rate in args.rates:
        with tempfile.TemporaryDirectory() as folder:
            _write_profile(args.step_ms, path := Path(folder) / "byte_transformer.json")
            case = Case(str(path), 1.0, NUM_RANKS, 1, rate)
            alone, *outcomes = play(case, list(SYSTEMS), 3 if args.quick else 5)
        baseline = next(one for one in outcomes if one.system == BASELINE)
        cells = [["method", "step ms", "MB/step", "computes", "of at most", "time to DDP's loss s", "sooner than DDP"]]
        for outcome in outcomes:
            bound = _utilisation_bound(outcome, parse(outcome.system)[1])
            row = [report.three_digits(1e3 * outcome.p50), report.three_digits(outcome.wire_bytes / 1e6)]
            row += [f"{alone.p50 / outcome.p50:.0%}", f"{bound:.0%}"]
            to = steps[outcome.system]
            if None in to:
                row += ["-", "-"]
            else:  # over the same seeds
                times_s = [
                    statistics.mean(to) * outcome.p50,
                    statistics.mean(steps[BASELINE][: len(to)]) * baseline.p50,
                ]
                row += [f"{times_s[0]:.0f}", f"{times_s[1] / times_s[0]:.1f}"]
            cells.append([outcome.system, *row])
        title = f"### {rate} Mbit/s, compute {1e3 * alone.p50:.0f} ms a step"
        result.say(title, "", *report.aligned(cells))
    figure, axes = report.subplots(1)
    for system in SYSTEMS:
        axes[0].plot(*zip(*found[system, 0].items(), strict=True), label=system)
    axes[0].set(xlabel="step", ylabel="loss on held-out text, nats per byte")
    axes[0].legend(fontsize=7)
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)

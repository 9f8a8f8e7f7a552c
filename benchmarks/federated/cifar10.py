"""Measures a round of the CIFAR10 benchmark of pfl-research, on synthetic images, compared with it and others.

The settings are those that the repository apple/pfl-research publishes. benchmarks/image_classification/configs/
baseline.yaml: IID users with 50 images each, a cohort of 50, one local epoch in batches of 10 with a learning rate of
0.1, users of equal weight, a central learning rate of 1 over 1,500 rounds. benchmarks/model/pytorch/cnn.py
(simple_cnn): convolutions of 32 and 64 filters of 3x3 without padding, a max-pool of 2x2, dense layers of 128 and 10,
1.63 million parameters. benchmarks/dataset/cifar10 and model/pytorch/layer.py: float32 images [32, 32, 3], which the
model permutes, so that torch computes its convolutions in channels_last. Here it lacks the two dropouts, since the
contenders draw different numbers, and every round has the same cohort of 50; nothing is evaluated.

Each contender's model after its first round is compared with that of the loop over clients. All run on one core each,
except for those with 2 ranks or processes. The floor is the convolutions and matrix products of the round alone, each
one repeated on operands that stay in the cache. "Kept memory" means that glibc is told not to return memory. Ratios
above 1 are faster: "ratio" than the loop over clients with a module and an optimizer, "to pfl" than pfl-research on as
many cores, and with kept memory where the row has it.

    .venv/bin/python -m benchmarks.federated.cifar10 [--pfl PYTHON] [--flower PYTHON] [--quick]
"""

from __future__ import annotations

from benchmarks.federated.contenders import Contender
from benchmarks.federated.federated_round import add_interpreters, interpreters, rounds
from benchmarks.federated.tasks import TASKS
from benchmarks.lib import report

COHORT = 50
# glibc returns blocks of more than 32 MiB, and a free end of the heap, to the kernel at once, which clears their pages
# when they are used again. These make it keep them.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
KEPT = {"keep_memory": True}  # the same, as the library does it
AS_IT_IS = {"verb": "map_reduce", "vectorize": False}
COMPILED = {**AS_IT_IS, "compile_client": True}
PFL = Contender("pfl-research", "pfl", "pfl")
FLOOR = Contender("floor: products alone", "products_alone", is_complete=False)
CONTENDERS = (
    Contender("loop over clients, nn.Module", "loop_of_modules"),
    Contender("loop over clients, autograd", "loop"),
    Contender("loop over clients, torch.func", "loop_func"),
    Contender("loop over a compiled client", "loop_of_compiled"),
    PFL,
    Contender("bagua, map_fn", "bagua"),
    Contender("bagua, map_fn, all at once", "bagua", options={"chunk_size": COHORT}),
    Contender("bagua, map_reduce", "bagua", options={"verb": "map_reduce"}),
    Contender("bagua, map_reduce, torch.optim", "bagua", options=AS_IT_IS),
    Contender("bagua, map_reduce, a compiled client", "bagua", options=COMPILED),
    Contender("bagua, map_fn, kept memory", "bagua", options=KEPT),
    Contender("bagua, map_reduce, kept memory", "bagua", options={"verb": "map_reduce", **KEPT}),
    Contender("bagua, map_reduce, a compiled client, kept memory", "bagua", options={**COMPILED, **KEPT}),
    Contender("pfl-research, kept memory", "pfl", "pfl", environ=KEPT_MEMORY),
    FLOOR,
    Contender("pfl-research, 2 processes", "pfl", "pfl", cores=2),
    Contender("bagua, map_reduce, torch.optim, 2 ranks", "bagua_on_ranks", cores=2, options=AS_IT_IS),
    Contender("bagua, map_reduce, a compiled client, 2 ranks", "bagua_on_ranks", cores=2, options=COMPILED),
    Contender("Flower, 2 processes", "flower", "flwr", cores=2),
)
_LIMIT_S = 300.0  # torch.compile on a busy machine


def _pfl_like(contender: Contender) -> Contender:
    """Returns pfl-research on as many cores, with as much memory kept where it was measured."""
    is_kept = "kept memory" in contender.name
    like = [one for one in CONTENDERS if one.function == "pfl" and one.cores == contender.cores]
    return next((one for one in like if bool(one.environ) == is_kept), like[0])


def main() -> None:
    parser = report.parser(__doc__)
    add_interpreters(parser, ("pfl", "flower"))
    args = parser.parse_args()
    pythons, missing = interpreters(args)
    task = TASKS["cifar10"]
    setup = {
        "task": f"{task.num_parameters()} parameters, {COHORT} clients, {task.steps} steps of {task.batch} images each",
        **({"not there": ", ".join(missing)} if missing else {}),
    }
    result = report.Report(__file__, "how long a round of pfl-research's CIFAR10 benchmark takes", args, setup)
    rows, firsts, failures = rounds(CONTENDERS, task.name, COHORT, 2 if args.quick else 7, pythons, _LIMIT_S)
    p50 = {row.case: row.p50 for row in rows}
    pfls = {one.name: _pfl_like(one).name for one in CONTENDERS}
    for row in rows:
        row.cells = {
            "to pfl": f"{p50[pfls[row.case]] / row.p50:.2f}" if pfls[row.case] in p50 else "",
            "x floor": f"{row.p50 / p50[FLOOR.name]:.2f}",
            **row.cells,
            "first round s": report.three_digits(firsts[row.case]),
        }
    result.add(report.Table(f"A round of {COHORT} clients", rows))
    for failure in failures:
        result.say(f"Failed: {failure}")
    result.write()


if __name__ == "__main__":
    main()

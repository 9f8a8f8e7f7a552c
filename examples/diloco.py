"""Trains a byte-level transformer across a slow link: tens of local steps, and then one exchange.

    bagua run --nproc-per-node 2 examples/diloco.py                     # two ranks on this host
    bagua run --nnodes 2 --master-addr HOST --node-rank 0 examples/diloco.py --method streaming   # and 1 on the other

Each rank takes its share of the tokens: with twice the ranks half the steps. AdamW's state stays on its rank; its
learning rate warms up and decays as it would in one process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import torch
from byte_lm import CONTEXT, VALIDATION_WINDOWS, ByteTransformer, load_text, loss_of, windows

import bagua

METHODS = {
    "every-step": {"algorithm": "gradient_allreduce"},
    "diloco": {"algorithm": "diloco", "sync_every": 20},
    "streaming": {"algorithm": "diloco", "sync_every": 20, "fragments": 2, "overlap_steps": 5, "codec": "minmax_uint8"},
}


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Returns the rate of a step: a linear warm-up over a tenth of the steps, and a cosine to a tenth of the peak."""
    warm_up = max(1, num_steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, num_steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="diloco", choices=METHODS)
    parser.add_argument("--windows", type=int, default=6400, help="of 64 bytes, over all ranks")
    parser.add_argument("--batch-size", type=int, default=16, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    bagua.init_process_group()
    rank, world_size = bagua.get_rank(), bagua.get_world_size()
    train, validation = load_text(4_000_000)
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)  # every rank draws different windows
    torch.manual_seed(args.seed)
    model = ByteTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    bagua.with_bagua(model, optimizer, **METHODS[args.method])

    num_steps = args.windows // (args.batch_size * world_size)
    before, begin = bagua.get_default_group().bytes_sent, time.perf_counter()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps, args.lr)
        starts = torch.randint(len(train) - CONTEXT, (args.batch_size,), generator=generator)
        optimizer.zero_grad()
        loss = loss_of(model, windows(train, starts))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}", flush=True)
    model.bagua.synchronize()  # the global model: what is under way is finished, and one outer step is taken
    train_s, sent = time.perf_counter() - begin, bagua.get_default_group().bytes_sent - before

    spread = torch.linspace(0, len(validation) - CONTEXT - 1, VALIDATION_WINDOWS).long()
    with torch.no_grad():
        validation_loss = float(loss_of(model.eval(), windows(validation, spread)))
    if rank == 0:
        numel = sum(parameter.numel() for parameter in model.parameters())
        result = {"example": "diloco", "method": args.method, "ranks": world_size, "steps": num_steps}
        result |= {"validation_loss": validation_loss, "train_s": train_s, "sent_per_rank_mb": sent / 1e6}
        result["sent_bits_per_parameter_and_step"] = 8 * sent / numel / num_steps
        print(json.dumps(result), flush=True)
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()

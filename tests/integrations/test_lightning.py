"""BaguaStrategy in Lightning's own Trainer; the oracle is the same Trainer on torch's DDP over gloo."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

import bagua
from tests.distributed.worlds import SAME_TEST

pytestmark = pytest.mark.needs("lightning")
ROOT = Path(__file__).resolve().parents[2]
ONEBIT = {"algorithm": "bytegrad", "codec": "onebit", "error_feedback": True}
OF_WEIGHTS = [{"algorithm": "decentralized"}, {"algorithm": "local_sgd", "sync_every": 3}]
OF_WEIGHTS += [{"algorithm": "low_precision_decentralized"}]
QADAM = {"algorithm": "qadam", "codec": "onebit"}


def modules():
    """Returns the LightningModules; Lightning is imported in the ranks."""
    from tests.integrations.lightning_modules import Manual, Net

    return {"automatic": Net, "manual": Manual}


def loader(num_samples=64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 8, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)


def fit(module, strategy, *, ckpt_path=None, **options):
    """Trains, and returns the Trainer."""
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": 2, "devices": 2, "enable_checkpointing": False, **quiet, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice
        trainer = Trainer(strategy=strategy, accelerator="cpu", **options)
        trainer.fit(module, loader(), loader(16), ckpt_path=ckpt_path)
    return trainer


def ours(algorithm="gradient_allreduce", **options):
    from bagua.integrations.lightning import BaguaStrategy

    return BaguaStrategy(algorithm, **options)


def plain(states):
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, states)


def weights_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@contextlib.contextmanager
def groups_end(backend=None):
    """The groups of torch.distributed and of bagua end with the block."""
    if backend is not None:
        dist.init_process_group(backend, timeout=timedelta(seconds=30))
    try:
        yield
    finally:
        bagua.destroy_process_group()
        if dist.is_initialized():
            dist.destroy_process_group()


def float16(scaler):
    """Returns the options of a Trainer in float16 on the CPU, for which Lightning has no string."""
    from lightning.pytorch.plugins import MixedPrecision

    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler("cpu", init_scale=2.0**20))]}


def _beside_ddp(rank, world_size, kind, options):
    with groups_end("gloo"):
        pairs = []
        for strategy, scaler in (
            ("ddp_find_unused_parameters_true", torch.amp.GradScaler),
            (ours(find_unused_parameters=True), bagua.amp.GradScaler),
        ):
            module = modules()[kind]()
            of_trainer = float16(scaler) if options == "float16" else options
            trainer = fit(module, strategy, **of_trainer)
            pairs.append((weights_of(module), {name: float(value) for name, value in trainer.callback_metrics.items()}))
        (theirs, their_metrics), (mine, my_metrics) = pairs
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
        assert my_metrics == pytest.approx(their_metrics, rel=1e-3)
        return my_metrics


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("automatic", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        pytest.param("automatic", {"precision": "bf16-mixed"}, marks=SAME_TEST),
        ("automatic", "float16"),
        ("manual", {}),
    ],
    ids=["accumulation", "bfloat16", "float16", "manual"],
)
def test_trains_as_ddp_does(pool2, kind, options):
    metrics = pool2.run(_beside_ddp, args=(kind, options))
    assert metrics[0] == metrics[1]  # of sync_dist


def _exchanges(rank, world_size):
    import bagua.integrations.lightning  # noqa: F401

    with groups_end():
        module = modules()["automatic"]()
        trainer = fit(module, "bagua", max_epochs=1, accumulate_grad_batches=2)
        assert dist.get_backend() == "bagua" and not hasattr(module, "bagua")
        assert type(trainer.strategy).__name__ == "BaguaStrategy"
        return [after - before for before, after in zip(module.sent_bytes, module.sent_bytes[1:], strict=False)]


def test_micro_batches_send_nothing(pool2):
    """One exchange for two micro-batches, though training_step calls the module itself, too."""
    for sent in pool2.run(_exchanges):
        num_bytes = 4 * (8 * 32 + 32 + 2 * 32 + 32 * 4 + 4)
        assert len(sent) == 3 and sent[1] == 0, sent
        assert all(num_bytes <= of_step < 2 * num_bytes for of_step in sent[0::2]), sent


def _tokens(rank, world_size):
    """One step of a mean over rows, of ranks and micro-batches with different numbers of them."""
    Net = modules()["automatic"]

    class Weighted(Net):
        def training_step(self, batch, index):
            rows = [one[: 8 - 3 * self.global_rank - index] for one in batch]
            seen.append(rows)
            weight = self.trainer.model.bagua.weight(len(rows[0]))
            return self.loss(rows) * weight * self.trainer.accumulate_grad_batches

        def on_before_optimizer_step(self, optimizer):
            self.grads = [parameter.grad.clone() for parameter in self.parameters()]

    seen = []
    with groups_end():
        module, whole = Weighted(), Net()
        for one in (module, whole):
            one.net[1] = torch.nn.Identity()
        fit(module, ours(), max_steps=1, accumulate_grad_batches=2)
        of_ranks = [None] * world_size
        dist.all_gather_object(of_ranks, seen)
        rows = [torch.cat(columns) for columns in zip(*(rows for of_rank in of_ranks for rows in of_rank), strict=True)]
        assert [len(column) for column in rows] == [8 + 7 + 5 + 4] * 2
        whole.loss(rows).backward()
        torch.testing.assert_close(module.grads, [parameter.grad for parameter in whole.parameters()])


def test_means_that_count_tokens(pool2):
    pool2.run(_tokens)


def _resume(rank, world_size, folder, options):
    from lightning.pytorch.callbacks import ModelCheckpoint

    kind = "qadam" if options["algorithm"] == "qadam" else "sgd"
    with groups_end():
        folder = ours().broadcast(str(folder))
        straight = modules()["automatic"](kind)
        keeps = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        fit(straight, ours(**options), max_epochs=4, enable_checkpointing=True, callbacks=[keeps])
        resumed = modules()["automatic"](kind)
        trainer = fit(resumed, ours(**options), max_epochs=4, ckpt_path=f"{folder}/epoch=1.ckpt")
        assert trainer.global_step == 16
        torch.testing.assert_close(weights_of(resumed), weights_of(straight), rtol=0, atol=0)
        # What is saved after fit has the states, too.
        trainer.save_checkpoint(f"{folder}/end.ckpt")
        saved, ended = (torch.load(f"{folder}/{name}.ckpt", weights_only=False) for name in ("epoch=3", "end"))
        assert len(ended["bagua"]) == world_size and plain(ended["bagua"]) == plain(saved["bagua"])


@pytest.mark.parametrize(
    "options",
    [ONEBIT, *(pytest.param(one, marks=SAME_TEST) for one in (*OF_WEIGHTS, QADAM))],
    ids=lambda options: options["algorithm"],
)
def test_resuming_equals_never_having_stopped(pool2, tmp_path, options):
    pool2.run(_resume, args=(tmp_path, options))


def _apart(rank, world_size, path):
    """Two ranks train apart and save; another number of ranks resumes, and returns the weights with which it begins."""
    from lightning.pytorch.callbacks import Callback

    class Begins(Callback):
        def on_train_start(self, trainer, module):
            begun.update(weights_of(module))

    begun, module = {}, modules()["automatic"]()
    with groups_end():
        strategy = ours("local_sgd", sync_every=100)
        if world_size == 2:
            fit(module, strategy).save_checkpoint(path)
            begun = weights_of(module)
        else:
            fit(module, strategy, ckpt_path=path, devices=world_size, max_epochs=3, callbacks=[Begins()])
        return plain(begun)


def test_on_another_number_of_ranks_weights_begin_from_their_mean(pool2, tmp_path):
    from bagua.testing import spawn

    path = str(tmp_path / "apart.ckpt")
    first, second = pool2.run(_apart, args=(path,))
    (loaded,) = spawn(_apart, 1, args=(path,))
    assert first != second
    for name, mean in loaded.items():
        mine, other = torch.tensor(first[name]), torch.tensor(second[name])
        expected = (mine + other) / 2 if mine.is_floating_point() else mine
        torch.testing.assert_close(torch.tensor(mean), expected)


def _async(rank, world_size, folder):
    from lightning.pytorch.callbacks import Callback

    class UntilAveraged(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            is_averaged = trainer.model.bagua.timeline().summary()["bytes_sent"] > 0
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(is_averaged)

    with groups_end():
        path = f"{ours().broadcast(str(folder))}/end.ckpt"
        strategy = ours("async", sync_interval=0.001)
        fit(modules()["automatic"](), strategy, max_epochs=-1, callbacks=[UntilAveraged()]).save_checkpoint(path)
        states = torch.load(path, weights_only=False)["bagua"]
        assert [sorted(own) for own in states] == [["bagua", "model", "optimizers"]] * world_size


def test_weights_are_averaged_in_the_background(pool2, tmp_path):
    pool2.run(_async, args=(tmp_path,))


def _refuse(rank, world_size):
    for name in ("ddp_comm_hook", "model_averaging_period"):
        with pytest.raises(bagua.InvalidArgument, match=f"no option '{name}'"):
            ours(**{name: 1})
    with groups_end(), pytest.raises(bagua.InvalidArgument, match="option 'codek'"):
        fit(modules()["automatic"](), ours("bytegrad", codek="bf16"))


def test_what_is_not_honoured_is_refused(pool2):
    pool2.run(_refuse)


PROGRAM = """
import os
import sys
import bagua.integrations.lightning
from tests.integrations.test_lightning import fit, modules, ours, weights_of
if __name__ == "__main__":
    trainer = fit(modules()["automatic"](), ours(start_method="spawn") if "spawn" in sys.argv else "bagua")
    loss = float(trainer.callback_metrics["val_loss"])
    sys.stdout.flush()
    # In one write, which no other rank's can part.
    os.write(1, f"\\nrank {trainer.global_rank} of {trainer.world_size} {loss}\\n".encode())
"""


@pytest.mark.slow("test_micro_batches_send_nothing")
@pytest.mark.parametrize(
    ("command", "ranks"),
    [([], {"0", "1"}), (["spawn"], {"0"}), (["-m", "bagua", "run", "--nproc-per-node", "2"], {"0", "1"})],
    ids=["popen", "spawn", "bagua run"],
)
def test_launchers(tmp_path, command, ranks):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [*command, str(program)] if command[:1] == ["-m"] else [str(program), *command]
    run = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    found = [line.split() for line in run.stdout.splitlines() if line.startswith("rank ")]
    assert {line[1] for line in found} == ranks and {line[3] for line in found} == {"2"}, run.stdout
    assert all(float(line[4]) < 1.2 for line in found)

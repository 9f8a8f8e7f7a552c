"""BaguaTrainer with a tiny random model; the oracle is transformers' own Trainer, on torch's DDP over gloo."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist

import bagua
from tests.distributed.worlds import SAME_TEST

pytestmark = pytest.mark.needs("transformers", "accelerate")


class Tokens(torch.utils.data.Dataset):
    """Rows of 4 to 12 tokens; the others are no labels."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(1, 64, (48, 12), generator=generator)
        self.lengths = torch.randint(4, 13, (48,), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index].clone()
        labels[self.lengths[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


@contextlib.contextmanager
def groups_end():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        yield
    finally:
        bagua.destroy_process_group()
        if dist.is_initialized():
            dist.destroy_process_group()
        for kind in (AcceleratorState, GradientState, PartialState):
            kind._reset_state()


def train(folder, algorithm, *, resume=None, callbacks=(), **options):
    """Trains on two micro-batches per step; returns the Trainer, and the bytes sent after each of them."""
    import transformers

    from bagua.integrations.transformers import BaguaTrainer

    class SentBytes(transformers.TrainerCallback):
        def on_substep_end(self, *args, **kwargs):
            handle = getattr(trainer.model_wrapped, "bagua", None)
            spans = handle.timeline(parts=False).spans if handle is not None else ()
            sent_bytes.append(sum(span.bytes_sent for span in spans if span.kind == "operation"))

        on_step_end = on_substep_end

    sent_bytes = []
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, attention_dropout=0.1, **sizes)
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1000, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        **{**quiet, "max_steps": 4, **options},
    )
    made = {"model": transformers.LlamaForCausalLM(config), "args": arguments, "train_dataset": Tokens()}
    if algorithm is not None:
        trainer = BaguaTrainer(**made, callbacks=[SentBytes(), *callbacks], algorithm=algorithm)
    else:
        trainer = transformers.Trainer(**made)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, sent_bytes


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def _beside_ddp(rank, world_size, folder, options):
    weights, losses = [], []
    with groups_end():
        for algorithm in (None, "gradient_allreduce"):
            trainer, sent_bytes = train(folder, algorithm, **options)
            weights.append(weights_of(trainer))
            losses.append(trainer.evaluate(Tokens())["eval_loss"])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-5)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    num_bytes = 4 * sum(parameter.numel() for parameter in trainer.model.parameters())
    sent = [after - before for before, after in itertools.pairwise(sent_bytes)]
    assert sent[1::2] == [0, 0, 0] and all(num_bytes <= one < 2 * num_bytes for one in sent[0::2]), sent


@pytest.mark.parametrize("options", [{"bf16": True}, pytest.param({}, marks=SAME_TEST)], ids=["bf16", "float32"])
def test_trains_as_ddp_does(pool2, tmp_path, options):
    """With clipping, ranks that have different numbers of tokens, and micro-batches that send nothing."""
    pool2.run(_beside_ddp, args=(tmp_path, options))


def _resume(rank, world_size, folder, algorithm):
    weights = []
    with groups_end():
        for resume in (None, f"{folder}/checkpoint-3"):
            trainer, _ = train(folder, algorithm, resume=resume, max_steps=6, save_strategy="steps", save_steps=3)
            assert trainer.state.global_step == 6
            weights.append(weights_of(trainer))
            dist.barrier()  # rank 0 has written its last checkpoint
            trainer.model_wrapped.bagua.remove()
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


ONEBIT = bagua.algorithms.ByteGrad(codec="onebit", error_feedback=True)
ALGORITHMS = [ONEBIT, *(pytest.param(name, marks=SAME_TEST) for name in ("decentralized", "local_sgd"))]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["onebit", "decentralized", "local_sgd"])
def test_resuming_equals_never_having_stopped(pool2, tmp_path, algorithm):
    pool2.run(_resume, args=(tmp_path, algorithm))


def _apart(rank, world_size, folder):
    """Two ranks train apart and save; another number of ranks resumes, and returns the weights with which it begins."""
    import transformers

    class Begins(transformers.TrainerCallback):
        def on_train_begin(self, *args, model, **kwargs):
            begun.update({name: value.tolist() for name, value in model.state_dict().items()})

    begun, options = {}, {"save_strategy": "steps", "save_steps": 3}
    resume = None if world_size == 2 else f"{folder}/checkpoint-3"
    with groups_end():
        algorithm = bagua.algorithms.LocalSGD(sync_every=100)
        trainer, _ = train(
            folder, algorithm, resume=resume, callbacks=[Begins()], max_steps=3 * (3 - world_size), **options
        )
        if dist.is_initialized():
            dist.barrier()  # rank 0 has written its checkpoint
        trainer.model_wrapped.bagua.remove()
        return begun if resume else {name: value.tolist() for name, value in weights_of(trainer).items()}


def test_on_another_number_of_ranks_weights_begin_from_their_mean(pool2, tmp_path):
    from bagua.testing import spawn

    first, second = pool2.run(_apart, args=(tmp_path,))
    (loaded,) = spawn(_apart, 1, args=(tmp_path,))
    assert first != second
    for name, mean in loaded.items():
        expected = (torch.tensor(first[name]) + torch.tensor(second[name])) / 2
        torch.testing.assert_close(torch.tensor(mean), expected)


def _again(rank, world_size, folder):
    """A second train() continues on the same model."""
    with groups_end():
        trainer, _ = train(folder, "decentralized", max_steps=2)
        before = weights_of(trainer)
        trainer.train()
        assert trainer.model_wrapped.bagua.num_wraps == 2
        assert any(not torch.equal(value, before[name]) for name, value in weights_of(trainer).items())
        trainer.model_wrapped.bagua.remove()


def test_a_second_train(pool2, tmp_path):
    pool2.run(_again, args=(tmp_path,))

"""All functions of torch.nn.functional in client functions: derivatives of three orders in every mix of modes.

All derivatives are along one direction, so those of an order are one number, whatever modes they are taken in. The
oracle takes no derivative: it is a polynomial through values of a loop over clients.
"""

import functools
import itertools
import math
import re

import pytest
import torch
from torch.func import grad, jvp
from torch.nn import functional as F

from bagua import federated
from bagua.errors import InvalidArgument

torch.manual_seed(0)
CLIENTS, SIZE = 3, 3
P, Y = torch.randn(SIZE, dtype=torch.float64), torch.randn(CLIENTS, SIZE, dtype=torch.float64)
ALONG = torch.tensor([0.6, -0.5, 0.4], dtype=torch.float64)
NUM_ELEMENTS = 256
CENTERS = torch.randint(-3, 3, (NUM_ELEMENTS,)).double() / 2 + 0.25  # where functions have no kinks
FACTORS, OF_CLIENTS = torch.randn(2, NUM_ELEMENTS, SIZE, dtype=torch.float64)


class Elements:
    """Tensors whose elements depend on ``p``, each on its own, and on a client's ``y``: the first or all of them."""

    def __init__(self, p, y, is_first_alone):
        own = CENTERS + (FACTORS @ p + OF_CLIENTS @ y).sin() / 6
        self._all = [own, CENTERS + (FACTORS @ p).sin() / 6 if is_first_alone else own]
        self._end = 0

    def __call__(self, *shape):
        begin, self._end = self._end, self._end + math.prod(shape)
        return self._all[begin > 0][begin : self._end].reshape(shape)

    def positive(self, *shape):
        return self(*shape).exp()

    def probabilities(self, *shape):
        return self(*shape).sigmoid()


def indices(*values):
    return torch.tensor(values)


def unpool(pool, unpooling, x):
    pooled, where = pool(x, 2, return_indices=True)
    return unpooling(pooled, where, 2)


def heads(x):
    return F.multi_head_attention_forward(
        x(3, 2, 4), x(3, 2, 4), x(3, 2, 4), 4, 2, x(12, 4), x(12), None, None, False, 0.0, x(4, 4), x(4),
        need_weights=False,
    )[0]  # fmt: skip


LABELS = indices(0, 2)
FUNCTIONS = {  # by name; more of the same name after a comma
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x(1, 2, 5), 3),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x(1, 2, 5, 3), 2),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x(1, 1, 3, 3, 3), 2),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x(1, 2, 5), 3),
    "adaptive_max_pool1d_with_indices": lambda x: F.adaptive_max_pool1d_with_indices(x(1, 2, 5), 3)[0],
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x(1, 2, 5, 3), 2),
    "adaptive_max_pool2d_with_indices": lambda x: F.adaptive_max_pool2d_with_indices(x(1, 2, 5, 3), 2)[0],
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x(1, 1, 3, 3, 3), 2),
    "adaptive_max_pool3d_with_indices": lambda x: F.adaptive_max_pool3d_with_indices(x(1, 1, 3, 3, 3), 2)[0],
    "affine_grid": lambda x: F.affine_grid(x(1, 2, 3), [1, 1, 2, 3], align_corners=False),
    "alpha_dropout": lambda x: F.alpha_dropout(x(2, 3), 0.5, True),
    "avg_pool1d": lambda x: F.avg_pool1d(x(1, 2, 5), 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x(1, 2, 4, 3), 2),
    "avg_pool3d": lambda x: F.avg_pool3d(x(1, 1, 3, 3, 3), 2),
    "batch_norm": lambda x: F.batch_norm(x(2, 3, 2), None, None, x(3), x(3), True),
    "batch_norm, of two axes": lambda x: F.batch_norm(x(4, 3), None, None, x(3), x(3), True),
    "batch_norm, evaluated": lambda x: F.batch_norm(x(2, 3, 2), x(3), x.positive(3), x(3), x(3)),
    "bilinear": lambda x: F.bilinear(x(2, 3), x(2, 2), x(4, 3, 2), x(4)),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.probabilities(2, 3), x.probabilities(2, 3)),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(
        x(2, 3), x.probabilities(2, 3), x(3), pos_weight=x(3)
    ),
    "celu": lambda x: F.celu(x(2, 3)),
    "celu_": lambda x: F.celu_(x(2, 3).clone()),
    "channel_shuffle": lambda x: F.channel_shuffle(x(1, 4, 2), 2),
    "conv1d": lambda x: F.conv1d(x(2, 2, 5), x(3, 2, 2), x(3)),
    "conv1d, in groups": lambda x: F.conv1d(x(2, 4, 5), x(4, 2, 2), x(4), 2, 1, groups=2),
    "conv2d": lambda x: F.conv2d(x(1, 2, 4, 3), x(3, 2, 2, 2), x(3)),
    "conv3d": lambda x: F.conv3d(x(1, 1, 3, 3, 3), x(2, 1, 2, 2, 2), x(2)),
    "conv_tbc": lambda x: F.conv_tbc(x(5, 2, 2), x(2, 2, 3), x(3)),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x(2, 2, 4), x(2, 3, 2), x(3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x(1, 2, 3, 3), x(2, 2, 2, 2), x(2)),
    "conv_transpose3d": lambda x: F.conv_transpose3d(x(1, 1, 2, 2, 2), x(1, 2, 2, 2, 2), x(2)),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x(2, 3), x(2, 3), indices(1, -1)),
    "cosine_similarity": lambda x: F.cosine_similarity(x(2, 3), x(2, 3)),
    "cross_entropy": lambda x: F.cross_entropy(x(2, 3), LABELS),
    "cross_entropy, of probabilities": lambda x: F.cross_entropy(
        x(2, 3), x.probabilities(2, 3), label_smoothing=0.1, reduction="none"
    ),
    "cross_entropy, weighted": lambda x: F.cross_entropy(x(2, 3, 2), indices([0, 1], [2, 2]), x.positive(3)),
    "ctc_loss": lambda x: F.ctc_loss(
        x(4, 2, 3).log_softmax(-1), indices([1, 2], [2, 1]), indices(4, 4), indices(2, 1), reduction="none"
    ),
    "dropout": lambda x: F.dropout(x(2, 3)),
    "dropout1d": lambda x: F.dropout1d(x(2, 3, 2)),
    "dropout2d": lambda x: F.dropout2d(x(2, 3, 2, 2)),
    "dropout3d": lambda x: F.dropout3d(x(2, 3, 2, 1, 2)),
    "elu": lambda x: F.elu(x(2, 3), 0.7),
    "elu_": lambda x: F.elu_(x(2, 3).clone(), 0.7),
    "embedding": lambda x: F.embedding(indices(0, 1, 2, 1), x(3, 2)),
    "embedding_bag": lambda x: F.embedding_bag(indices(0, 1, 2, 1), x(3, 2), indices(0, 2), mode="mean"),
    "embedding_bag, weighted": lambda x: F.embedding_bag(
        indices(0, 1, 2, 1), x(3, 2), indices(0, 2), mode="sum", per_sample_weights=x(4)
    ),
    "embedding_bag, max": lambda x: F.embedding_bag(indices(0, 1, 2, 1), x(3, 2), indices(0, 2), mode="max"),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x(2, 3, 2), 0.5, True),
    "fold": lambda x: F.fold(x(1, 4, 4), (3, 3), 2),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x(1, 2, 5, 4), 2, (2, 2)),
    "fractional_max_pool2d_with_indices": lambda x: F.fractional_max_pool2d_with_indices(x(1, 2, 5, 4), 2, (2, 2))[0],
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(x(1, 1, 4, 4, 4), 2, (2, 2, 2)),
    "fractional_max_pool3d_with_indices": lambda x: F.fractional_max_pool3d_with_indices(
        x(1, 1, 4, 4, 4), 2, (2, 2, 2)
    )[0],
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x(2, 3), x(2, 3), x.positive(2, 3)),
    "gelu": lambda x: F.gelu(x(2, 3)),
    "gelu, tanh": lambda x: F.gelu(x(2, 3), approximate="tanh"),
    "glu": lambda x: F.glu(x(2, 4)),
    "grid_sample": lambda x: F.grid_sample(x(1, 1, 4, 4), x(1, 2, 3, 2) / 4, align_corners=False),
    "grid_sample, bicubic": lambda x: F.grid_sample(x(1, 1, 4, 4), x(1, 2, 3, 2) / 3, "bicubic", align_corners=True),
    "grid_sample, 3d": lambda x: F.grid_sample(x(1, 1, 2, 3, 2), x(1, 1, 2, 2, 3) / 3, align_corners=False),
    "group_norm": lambda x: F.group_norm(x(2, 4, 2), 2, x(4), x(4)),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x(2, 3)),
    "hardshrink": lambda x: F.hardshrink(x(2, 3)),
    "hardsigmoid": lambda x: F.hardsigmoid(x(2, 3)),
    "hardswish": lambda x: F.hardswish(x(2, 3)),
    "hardtanh": lambda x: F.hardtanh(x(2, 3)),
    "hardtanh_": lambda x: F.hardtanh_(x(2, 3).clone()),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x(2, 3), indices([1, -1, 1], [-1, 1, 1])),
    "huber_loss": lambda x: F.huber_loss(x(2, 3), x(2, 3)),
    "instance_norm": lambda x: F.instance_norm(x(2, 3, 4), weight=x(3), bias=x(3)),
    "instance_norm, evaluated": lambda x: F.instance_norm(
        x(2, 3, 4), x(3), x.positive(3), x(3), x(3), use_input_stats=False
    ),
    "interpolate": lambda x: F.interpolate(x(1, 1, 3, 3), 4, mode="bilinear"),
    **{
        f"interpolate, {mode}": lambda x, mode=mode, rank=rank: F.interpolate(x(1, 1, *[3] * rank), 4, mode=mode)
        for mode, rank in (("nearest", 1), ("linear", 1), ("bicubic", 2), ("trilinear", 3), ("area", 2))
    },
    "interpolate, antialiased": lambda x: F.interpolate(x(1, 1, 5, 5), 3, mode="bicubic", antialias=True),
    "kl_div": lambda x: F.kl_div(x(2, 3), x.probabilities(2, 3), reduction="none"),
    "l1_loss": lambda x: F.l1_loss(x(2, 3), x(2, 3)),
    "layer_norm": lambda x: F.layer_norm(x(2, 4), (4,), x(4), x(4)),
    "leaky_relu": lambda x: F.leaky_relu(x(2, 3)),
    "leaky_relu_": lambda x: F.leaky_relu_(x(2, 3).clone()),
    "linear": lambda x: F.linear(x(2, 3), x(4, 3), x(4)),
    "linear_cross_entropy": lambda x: F.linear_cross_entropy(x(2, 4), x(3, 4), LABELS, linear_bias=x(3)),
    "local_response_norm": lambda x: F.local_response_norm(x(1, 4, 2), 2),
    "log_softmax": lambda x: F.log_softmax(x(2, 3), 1),
    "logsigmoid": lambda x: F.logsigmoid(x(2, 3)),
    "lp_pool1d": lambda x: F.lp_pool1d(x.positive(1, 2, 4), 3, 2),
    "lp_pool2d": lambda x: F.lp_pool2d(x.positive(1, 2, 4, 2), 3, 2),
    "lp_pool3d": lambda x: F.lp_pool3d(x.positive(1, 1, 2, 4, 2), 3, 2),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x(3), x(3), indices(1, -1, 1)),
    "max_pool1d": lambda x: F.max_pool1d(x(1, 2, 5), 2),
    "max_pool1d_with_indices": lambda x: F.max_pool1d_with_indices(x(1, 2, 5), 2)[0],
    "max_pool2d": lambda x: F.max_pool2d(x(1, 2, 5, 4), 2),
    "max_pool2d_with_indices": lambda x: F.max_pool2d_with_indices(x(1, 2, 5, 4), 2)[0],
    "max_pool3d": lambda x: F.max_pool3d(x(1, 1, 2, 3, 4), 2),
    "max_pool3d_with_indices": lambda x: F.max_pool3d_with_indices(x(1, 1, 2, 3, 4), 2)[0],
    "max_unpool1d": lambda x: unpool(F.max_pool1d, F.max_unpool1d, x(1, 2, 4)),
    "max_unpool2d": lambda x: unpool(F.max_pool2d, F.max_unpool2d, x(1, 2, 4, 2)),
    "max_unpool3d": lambda x: unpool(F.max_pool3d, F.max_unpool3d, x(1, 1, 2, 4, 2)),
    "mish": lambda x: F.mish(x(2, 3)),
    "mse_loss": lambda x: F.mse_loss(x(2, 3), x(2, 3)),
    "multi_head_attention_forward": heads,
    "multi_margin_loss": lambda x: F.multi_margin_loss(x(2, 3), LABELS),
    "multi_margin_loss, weighted": lambda x: F.multi_margin_loss(x(2, 3), LABELS, weight=x.positive(3)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x(2, 3), indices([0, 2, -1], [1, -1, -1])),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x(2, 3), x.probabilities(2, 3), x(3)),
    "native_channel_shuffle": lambda x: F.native_channel_shuffle(x(1, 4, 2), 2),
    "nll_loss": lambda x: F.nll_loss(x(2, 3), LABELS),
    "nll_loss, weighted": lambda x: F.nll_loss(x(2, 3), LABELS, x.positive(3)),
    "nll_loss, of images": lambda x: F.nll_loss(x(2, 3, 1, 2), indices([[0, 2]], [[1, 1]]), reduction="none"),
    "normalize": lambda x: F.normalize(x(2, 3)),
    "pad": lambda x: F.pad(x(1, 2, 3), (1, 1)),
    **{
        f"pad, {mode}": lambda x, mode=mode: F.pad(x(1, 1, 3, 3), (1, 1, 1, 1), mode)
        for mode in ("reflect", "replicate", "circular")
    },
    "pairwise_distance": lambda x: F.pairwise_distance(x(2, 3), x(2, 3)),
    "pdist": lambda x: F.pdist(x(4, 3)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x(1, 4, 2, 2), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x(1, 1, 4, 2), 2),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x(2, 3), x.positive(2, 3), full=True),
    "prelu": lambda x: F.prelu(x(2, 3, 2), x(3)),
    "prelu, of one weight": lambda x: F.prelu(x(2, 3, 2), x(1)),
    "relu": lambda x: F.relu(x(2, 3)),
    "relu_": lambda x: F.relu_(x(2, 3).clone()),
    "relu6": lambda x: F.relu6(x(2, 3)),
    "rms_norm": lambda x: F.rms_norm(x(2, 4), (4,), x(4)),
    "rrelu": lambda x: F.rrelu(x(2, 3)),
    "rrelu, in training": lambda x: F.rrelu(x(2, 3), training=True),
    "rrelu_": lambda x: F.rrelu_(x(2, 3).clone()),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        x(1, 2, 3, 2), x(1, 2, 3, 2), x(1, 2, 3, 2)
    ),
    "selu": lambda x: F.selu(x(2, 3)),
    "selu_": lambda x: F.selu_(x(2, 3).clone()),
    "sigmoid": lambda x: F.sigmoid(x(2, 3)),
    "silu": lambda x: F.silu(x(2, 3)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x(2, 3), x(2, 3)),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x(2, 3), indices([1, -1, 1], [-1, 1, 1])),
    "soft_margin_loss, of real targets": lambda x: F.soft_margin_loss(x(2, 3), x(2, 3)),
    "softmax": lambda x: F.softmax(x(2, 3), 1),
    "softmin": lambda x: F.softmin(x(2, 3), 1),
    "softplus": lambda x: F.softplus(x(2, 3)),
    "softshrink": lambda x: F.softshrink(x(2, 3)),
    "softsign": lambda x: F.softsign(x(2, 3)),
    "tanh": lambda x: F.tanh(x(2, 3)),
    "tanhshrink": lambda x: F.tanhshrink(x(2, 3)),
    "threshold": lambda x: F.threshold(x(2, 3), 0.0, 0.5),
    "threshold_": lambda x: F.threshold_(x(2, 3).clone(), 0.0, 0.5),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x(2, 3), x(2, 3), x(2, 3)),
    "triplet_margin_with_distance_loss": lambda x: F.triplet_margin_with_distance_loss(x(2, 3), x(2, 3), x(2, 3)),
    "unfold": lambda x: F.unfold(x(1, 2, 3, 3), 2),
    "upsample": lambda x: F.upsample(x(1, 1, 3, 3), 4, mode="bilinear"),
    "upsample_bilinear": lambda x: F.upsample_bilinear(x(1, 1, 3, 3), 4),
    "upsample_nearest": lambda x: F.upsample_nearest(x(1, 1, 3), 4),
}
_NO_FUNCTION_OF_TENSORS = (
    "assert_int_or_pair", "boolean_dispatch", "handle_torch_function", "has_torch_function",
    "has_torch_function_unary", "has_torch_function_variadic",
)  # fmt: skip
LEFT_OUT = {
    "one_hot": "returns integers, which have no derivative",
    "grouped_mm": "takes no float64",
    "scaled_mm": "multiplies 8-bit floats, on some devices only",
    "scaled_grouped_mm": "multiplies 8-bit floats, on some devices only",
    **dict.fromkeys(_NO_FUNCTION_OF_TENSORS, "is no function of tensors"),
}

# Some derivatives of these raise, with one of these messages; whatever does not raise is right.
_TORCH_HAS_NONE = (
    "Trying to use forward AD with|derivative for .* is not implemented|is not differentiable with respect"
)
_IS_REFUSED = f"in forward mode, where torch takes its .* for a constant|{_TORCH_HAS_NONE}"
_IS_FLATTENED = "size of tensor a .* must match the size of tensor b"  # by vmap, if all clients have one target
_HAS_LOST_ITS_INPUT = "modified by an inplace operation"
RAISING = {
    **dict.fromkeys(("embedding_bag", "embedding_bag, weighted", "embedding_bag, max"), _TORCH_HAS_NONE),
    **dict.fromkeys(("grid_sample", "grid_sample, bicubic", "grid_sample, 3d"), _TORCH_HAS_NONE),
    **dict.fromkeys(("glu", "hardsigmoid", "native_channel_shuffle", "pdist"), _TORCH_HAS_NONE),
    **dict.fromkeys(("ctc_loss", "multilabel_margin_loss"), _TORCH_HAS_NONE),
    **dict.fromkeys(("huber_loss", "mse_loss", "smooth_l1_loss"), f"{_TORCH_HAS_NONE}|{_IS_FLATTENED}"),
    **dict.fromkeys(("multi_margin_loss", "multi_margin_loss, weighted"), _TORCH_HAS_NONE),
    **dict.fromkeys(("multi_head_attention_forward", "scaled_dot_product_attention"), _TORCH_HAS_NONE),
    **dict.fromkeys(("cross_entropy, weighted", "nll_loss, weighted"), _IS_REFUSED),
    "soft_margin_loss": _TORCH_HAS_NONE,
    "soft_margin_loss, of real targets": _IS_REFUSED,
    **dict.fromkeys(
        ("cosine_embedding_loss", "cosine_similarity", "normalize", "pairwise_distance"), _HAS_LOST_ITS_INPUT
    ),
    **dict.fromkeys(("triplet_margin_loss", "triplet_margin_with_distance_loss"), _HAS_LOST_ITS_INPUT),
    "conv_tbc": f"{_TORCH_HAS_NONE}|vmap: aten::addmm_",
    "gaussian_nll_loss": "attempting to use a Tensor in some data-dependent control flow|calling .item",
    **dict.fromkeys(("rrelu", "rrelu, in training", "rrelu_"), "vmap: we do not yet support aten::rrelu"),
}
WRONG_IN_TORCH = {"cosine_embedding_loss": "frf"}  # in loops over clients, too: it writes into what has tangents
DRAWN = {name for name in FUNCTIONS if any(word in name for word in ("dropout", "fractional", "gumbel"))}


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing by more, which wait for each other where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_function_is_in_a_table():
    found = {name for name, value in vars(F).items() if callable(value) and not name.startswith("_")}
    found -= {name for name in found if isinstance(vars(F)[name], type) or vars(F)[name].__module__ == "typing"}
    assert found == {name.split(",")[0] for name in FUNCTIONS} | set(LEFT_OUT)


def loss_of(name, is_first_alone):
    def loss(p, y):
        result = FUNCTIONS[name](Elements(p, y, is_first_alone))
        return (result * torch.linspace(-1, 2, result.numel(), dtype=p.dtype).reshape(result.shape)).sin().sum()

    return loss


STEP = 0.01
OFFSETS = torch.linspace(-2, 2, 9, dtype=torch.float64)
POWERS = OFFSETS[:, None] ** torch.arange(7)
TO_COEFFICIENTS = torch.linalg.pinv(POWERS)


@functools.cache
def expected_of(name, is_first_alone):
    """Returns the sum over clients and its first three derivatives."""
    loss = loss_of(name, is_first_alone)

    def value(offset, y):
        torch.manual_seed(0)
        return float(loss(P + STEP * offset * ALONG, y))

    values = torch.tensor([sum(value(offset, y) for y in Y) for offset in OFFSETS], dtype=torch.float64)
    coefficients = TO_COEFFICIENTS @ values
    torch.testing.assert_close(POWERS @ coefficients, values, rtol=1e-12, atol=1e-12)  # it has no kink here
    return [float(coefficients[order]) * math.factorial(order) / STEP**order for order in range(4)]


def along(mode, f):
    """Returns the derivative by forward mode ("f"), reverse mode ("r") or autograd ("a"), or f of two models ("v")."""
    if mode == "v":
        return lambda p: torch.func.vmap(f, randomness="same")(torch.stack([p / 2, p]))[1]
    if mode == "f":
        return lambda p: jvp(f, (p,), (ALONG,))[1]
    if mode == "r":
        return lambda p: grad(f)(p) @ ALONG

    def by_autograd(p):
        p = p if p.requires_grad else p.clone().requires_grad_()
        return torch.autograd.grad(f(p), p, create_graph=True)[0] @ ALONG

    return by_autograd


PROGRAMS = {
    "two verbs": lambda loss, p, y, **draws: federated.reduce_sum(
        federated.map_fn(loss, (federated.broadcast(p), y), **draws)
    ),
    "node": lambda loss, p, y, **draws: federated.map_reduce(
        loss, (federated.broadcast(p), y), reduce="sum", chunk_size=2, **draws
    ),
}


def derivative(loss, how, local, modes, randomness):
    """The derivative in modes within the client function, and then in others of the program, the innermost first."""
    for mode in local:
        loss = lambda p, y, loss=loss, mode=mode: along(mode, lambda p: loss(p, y))(p)  # noqa: E731
    program = federated.program(lambda p: PROGRAMS[how](loss, p, Y, randomness=randomness), clients=CLIENTS)
    for mode in modes:
        program = along(mode, program)
    torch.manual_seed(0)
    return float(program(P))


def some_raise(name, ways, programs=PROGRAMS):
    """Returns True if one of the derivatives raises, which must be in the table; those that do not must be right."""
    does_raise = False
    for how, (local, modes) in itertools.product(programs, ways):
        kind = {"name": name, "is_first_alone": how == "node"}
        loss, expected = loss_of(**kind), expected_of(**kind)
        try:
            found = derivative(loss, how, local, modes, "same" if name in DRAWN else "error")
        except (RuntimeError, InvalidArgument) as error:  # a NotImplementedError is a RuntimeError
            assert name in RAISING and re.search(RAISING[name], str(error)), f"{how}, {local}|{modes}: {error}"
            does_raise = True
        else:
            order = len((local + modes).replace("v", ""))
            text = f"{name}, {how}, {local}|{modes}: {found}, expected {expected[order]}"
            assert math.isclose(found, expected[order], rel_tol=1e-5, abs_tol=1e-5), text
    return does_raise


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_derivative_of_a_local_gradient(name):
    some_raise(name, [("r", "r")], ["node"])


WAYS = [
    ("", ""),
    *(("".join(modes[:local]), "".join(modes[local:])) for n in (1, 2) for modes in itertools.product("fr", repeat=n)
      for local in range(n + 1)),
    *((modes[:local], modes[local:]) for modes, local in zip(
        ("fff", "ffr", "frf", "frr", "rff", "rfr", "rrf", "rrr"), (0, 1, 2, 3, 1, 0, 3, 2), strict=True
    )),
    ("", "a"), ("", "aa"), ("r", "a"), ("", "aaa"), ("r", "aa"),
    ("", "v"), ("", "rv"), ("r", "rv"), ("", "frv"),
]  # fmt: skip


@pytest.mark.slow("test_a_derivative_of_a_local_gradient")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_derivatives(name):
    ways = [(local, modes) for local, modes in WAYS if local + modes != WRONG_IN_TORCH.get(name)]
    assert some_raise(name, ways) == (name in RAISING)


@pytest.mark.parametrize(("name", "modes"), WRONG_IN_TORCH.items())
@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a bug of torch: once it passes, its line can go")
def test_a_bug_of_torch(name, modes):
    some_raise(name, [("", modes)])

"""Profiles of models: parameters, forward time and backward time of a training step, layer by layer.

A profile is a small JSON file. ``record`` makes one from a model. ``SleepingModel`` plays one: it has real parameters,
whose gradients become ready at the times of the profile, and it sleeps instead of computing. So communication can be
measured for models and devices that are not available.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from bagua.errors import InvalidArgument
from bagua.files import replace_file

_LAYER_KEYS = {"name", "parameters", "forward_ms", "backward_ms"}
_DRAWN = 1 << 20
_DTYPES = ("float32", "float64", "float16", "bfloat16")


@dataclass(frozen=True)
class Layer:
    """A group of parameters whose gradients become ready together.

    Attributes:
        name: a name for tables and messages.
        parameters: the shape of each parameter.
        forward_ms: the time of its forward, in milliseconds.
        backward_ms: the time from the gradients of the next layer, in the order of forward, to its own gradients.
        dtype: the dtype of parameters and gradients: float32, float64, float16 or bfloat16. Optional in a file.
    """

    name: str
    parameters: tuple[tuple[int, ...], ...]
    forward_ms: float
    backward_ms: float
    dtype: str = "float32"


@dataclass(frozen=True)
class Profile:
    """The layers of a model in the order of forward, and the source of the figures.

    Example:
        >>> profile = Profile("two", "made up", (Layer("a", ((4, 8), (4,)), 1.0, 2.0), Layer("b", ((2, 4),), 0.5, 1.0)))
        >>> profile.num_parameters, profile.forward_ms, profile.backward_ms
        (44, 1.5, 3.0)
        >>> profile.scaled(0.5).num_parameters
        22
    """

    name: str
    source: str
    layers: tuple[Layer, ...]

    @property
    def num_parameters(self) -> int:
        """The number of elements of all layers together."""
        return sum(math.prod(shape) for layer in self.layers for shape in layer.parameters)

    @property
    def forward_ms(self) -> float:
        """The time of forward, in milliseconds."""
        return sum(layer.forward_ms for layer in self.layers)

    @property
    def backward_ms(self) -> float:
        """The time of backward, in milliseconds."""
        return sum(layer.backward_ms for layer in self.layers)

    def wire_over_compute(self, num_hosts: int, rate_mbit: float) -> float:
        """Returns the time that float32 gradients, 2 (n-1)/n of them, take on a host's link, over a step's compute.

        Below 1 a relaxation can save little; docs/performance.md lists the gain of each one by this ratio.

        Example:
            >>> two = Profile("two", "made up", (Layer("a", ((1000, 250),), 2.0, 6.0),))
            >>> two.wire_over_compute(num_hosts=2, rate_mbit=1000)  # a megabyte takes 8 ms
            1.0
        """
        wire_s = 2 * (num_hosts - 1) / num_hosts * 32 * self.num_parameters / (rate_mbit * 1e6)
        compute_s = (self.forward_ms + self.backward_ms) / 1e3
        return wire_s / compute_s if compute_s else math.inf

    def scaled(self, scale: float) -> Profile:
        """Returns a profile whose parameters have ``scale`` times as many elements, at least one each; times stay.

        A link of ``scale`` times the rate carries it in the time that the original takes, because only the number of
        elements counts. At scale 1 the profile is returned as it is; at any other a matrix gets a single column, so an
        algorithm that sends by the sides of a matrix is refused (``systems.check_scaled``).

        Raises:
            InvalidArgument: ``scale`` is not positive.
        """
        if not scale > 0:
            raise InvalidArgument(f"scale is {scale!r}, expected a positive number, such as 0.1")
        if scale == 1:
            return self
        return replace(
            self,
            layers=tuple(
                replace(layer, parameters=tuple(_scaled_shape(shape, scale) for shape in layer.parameters))
                for layer in self.layers
            ),
        )

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON, one line per layer."""
        layers = ",\n".join(f"    {json.dumps(asdict(layer))}" for layer in self.layers)
        head = f'{{\n  "name": {json.dumps(self.name)},\n  "source": {json.dumps(self.source)},\n'
        replace_file(path, f'{head}  "layers": [\n{layers}\n  ]\n}}\n'.encode())

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Reads a profile that ``save`` or a person wrote.

        Raises:
            InvalidArgument: the file is no profile; the message says why, and names the layer.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path} cannot be read as a profile: {error}") from error
        is_profile = isinstance(content, dict) and set(content) == {"name", "source", "layers"}
        if not is_profile or not isinstance(content["layers"], list) or not content["layers"]:
            raise InvalidArgument(f"{path} is no profile: expected an object of name, source and one layer or more")
        for key in ("name", "source"):
            if not isinstance(content[key], str):
                raise InvalidArgument(f"{path}: {key} is {content[key]!r}, expected a string")
        layers = tuple(_layer(path, one) for one in content["layers"])
        if not any(layer.parameters for layer in layers):
            raise InvalidArgument(f"{path} has no layer with parameters, so there is nothing to exchange; name shapes")
        return Profile(content["name"], content["source"], layers)


def _scaled_shape(shape: tuple[int, ...], scale: float) -> tuple[int, ...]:
    return (max(1, round(math.prod(shape) * scale)), *[1] * (len(shape) - 1))


def _layer(path: str | Path, content: Any) -> Layer:
    if not isinstance(content, dict) or set(content) - {"dtype"} != _LAYER_KEYS:
        keys = ", ".join(sorted(_LAYER_KEYS))
        raise InvalidArgument(f"{path}: a layer is {content!r}, expected an object of {keys}, and dtype if not float32")
    if not isinstance(content["name"], str):
        raise InvalidArgument(f"{path}: the name of a layer is {content['name']!r}, expected a string")
    shapes, times = content["parameters"], (content["forward_ms"], content["backward_ms"])
    if not isinstance(shapes, list) or not all(map(_is_shape, shapes)):
        raise InvalidArgument(f"{path}: parameters of layer {content['name']!r} are {shapes!r}, expected their shapes")
    if not all(type(ms) in (int, float) and 0 <= ms < 1e6 for ms in times):
        raise InvalidArgument(f"{path}: times of layer {content['name']!r} are {times!r}, expected milliseconds")
    dtype = content.get("dtype", "float32")
    if dtype not in _DTYPES:
        raise InvalidArgument(
            f"{path}: dtype of layer {content['name']!r} is {dtype!r}, expected one of {', '.join(_DTYPES)}"
        )
    return Layer(content["name"], tuple(map(tuple, shapes)), *map(float, times), dtype)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and bool(shape) and all(type(size) is int and size > 0 for size in shape)


# --- a model that sleeps instead of computing --------------------------------------------------


class SleepingModel(torch.nn.Module):
    """A model with the layers of ``profile``: ``model()`` returns a scalar, whose ``backward()`` makes all gradients.

    Instead of computing, the calling thread sleeps, as a host waits for its accelerator. Forward and backward begin
    when they are called, and each layer ends at the time of the profile, so work of the host in between, in hooks for
    example, costs no accelerator time. Gradients take no computation: they are the same memory in every step, filled
    once from ``torch.manual_seed``'s generator, a large one with its first million numbers again and again. Weights are
    zero, because no result depends on them.

    Args:
        profile: the layers and their times.
        device: keeps the time otherwise than by sleeping.
    """

    def __init__(self, profile: Profile, device: Device | None = None) -> None:
        super().__init__()
        self.profile = profile
        self._device = _Device() if device is None else device
        self.layers = torch.nn.ModuleList(_SleepingLayer(layer, self._device) for layer in profile.layers)

    def forward(self) -> torch.Tensor:
        """Returns a scalar."""
        x = torch.zeros((), requires_grad=True)
        self._device.begin()
        for layer in self.layers:
            x = layer(x)
        return _Begin.apply(x, self._device)


class Device(Protocol):
    """An accelerator that only keeps time."""

    def begin(self) -> None:
        """Begins new work now; earlier work is done."""

    def work(self, seconds: float) -> None:
        """Waits for the next ``seconds`` of work, which began when the previous work ended."""


class _Device:
    """A device that sleeps."""

    def begin(self) -> None:
        self._busy_until = time.monotonic()

    def work(self, seconds: float) -> None:
        self._busy_until += seconds
        time.sleep(max(0.0, self._busy_until - time.monotonic()))


class _SleepingLayer(torch.nn.Module):
    def __init__(self, layer: Layer, device: Device) -> None:
        super().__init__()
        self.forward_s, self.backward_s = layer.forward_ms / 1e3, layer.backward_ms / 1e3
        self.device = device
        dtype = getattr(torch, layer.dtype)
        self.weights = torch.nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in layer.parameters)
        self.gradients = [_random(shape, dtype) for shape in layer.parameters]
        self._inputs = tuple(self.weights)  # a ParameterList finds each by its name, which takes time in every step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Work.apply(x, self, *self._inputs)


def _random(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    values, drawn = torch.empty(math.prod(shape), dtype=dtype), torch.randn(min(math.prod(shape), _DRAWN), dtype=dtype)
    for part in values.split(_DRAWN):
        part.copy_(drawn[: len(part)])
    return values.view(tuple(shape))


class _Work(torch.autograd.Function):
    """The forward and backward of a layer; a gradient is a new tensor on the layer's memory, which autograd keeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: _SleepingLayer, *weights: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        layer.device.work(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.layer.device.work(ctx.layer.backward_s)
        return grad, None, *(gradient.detach() for gradient in ctx.layer.gradients)


class _Begin(torch.autograd.Function):
    """The node at which backward begins."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: Device) -> torch.Tensor:
        ctx.device = device
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.device.begin()
        return grad, None


# --- recording ---------------------------------------------------------------------------------


def record(
    model: torch.nn.Module,
    loss: Callable[[torch.nn.Module], torch.Tensor],
    *,
    name: str = "",
    source: str = "",
    repetitions: int = 5,
) -> Profile:
    """Measures a model's profile on this machine.

    A layer is a module with direct parameters. The time of everything else counts towards the next layer. An
    accelerator is synchronised at each measurement. Times are medians over the repetitions, after two warm-up steps.
    Gradients are set to None.

    Args:
        model: the model, not wrapped.
        loss: runs one forward of ``model`` and returns the scalar that ``backward()`` is called on.
        name: the profile's name; the model's class by default.
        source: the source of the figures; the device by default.
        repetitions: the number of measured steps, at least one.

    Raises:
        InvalidArgument: ``repetitions`` is not a positive integer; the loss is no scalar tensor, or no parameter takes
            part in it; a layer's parameters have no shape yet, or do not share a dtype that a profile can hold.

    Example:
        >>> x = torch.randn(8, 16)
        >>> profile = record(torch.nn.Linear(16, 4), lambda model: model(x).sum())
        >>> profile.num_parameters, len(profile.layers)
        (68, 1)
    """
    check_repetitions(repetitions)
    recorder = _Recorder(model)
    try:
        steps = [recorder.step(loss) for _ in range(repetitions + 2)][2:]
    finally:
        recorder.remove()
    model.zero_grad()
    backward_order = list(steps[-1][1])  # in the order in which gradients became ready
    if not backward_order:
        raise InvalidArgument("no parameter of the model has got a gradient from loss(model).backward()")
    layers = []
    for layer in reversed(backward_order):
        shapes = tuple(tuple(parameter.shape) or (1,) for parameter in recorder.parameters[layer])
        forward_ms, backward_ms = (
            round(statistics.median(step[part].get(layer, 0.0) for step in steps) * 1e3, 4) for part in (0, 1)
        )
        layers.append(Layer(layer, shapes, forward_ms, backward_ms, recorder.dtypes[layer]))
    return Profile(name or type(model).__name__, source or _device_of(model), tuple(layers))


def check_repetitions(repetitions: int) -> None:
    """Raises InvalidArgument unless ``repetitions`` is an integer of at least 1."""
    if type(repetitions) is not int or repetitions < 1:
        raise InvalidArgument(f"repetitions is {repetitions!r}, expected an integer of at least 1, such as 5")


class _Recorder:
    """The hooks that record the time when a layer's forward has ended and when its last gradient is ready."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.parameters: dict[str, list[torch.nn.Parameter]] = {}  # by layer
        self.dtypes: dict[str, str] = {}
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._events: list[tuple[str, float]] = []
        self._hooks: list[Any] = []
        modules: dict[str, torch.nn.Module] = {}
        seen: set[int] = set()
        for name, module in model.named_modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
            if not own:
                continue
            seen.update(map(id, own))
            layer = name or type(module).__name__
            if any(map(torch.nn.parameter.is_lazy, own)):
                raise InvalidArgument(f"parameters of layer {layer!r} have no shape yet; run the model once before")
            self.parameters[layer], self.dtypes[layer] = own, _dtype_of(layer, own)
            modules[layer] = module
        for layer, module in modules.items():  # last, because nothing raises here
            self._hooks.append(module.register_forward_hook(lambda *_, layer=layer: self._record(layer)))
            self._hooks += [
                parameter.register_post_accumulate_grad_hook(lambda _, layer=layer: self._record(layer))
                for parameter in self.parameters[layer]
            ]

    def _now(self) -> float:
        if self._device.type != "cpu":
            getattr(torch, self._device.type).synchronize(self._device)  # it may not be the current device
        return time.perf_counter()

    def _record(self, layer: str) -> None:
        self._events.append((layer, self._now()))

    def step(self, loss: Callable[[torch.nn.Module], torch.Tensor]) -> tuple[dict[str, float], dict[str, float]]:
        """Runs a step; returns the seconds of forward and of backward by layer, in the order in which layers ended."""
        self._model.zero_grad()
        begin = self._now()
        value = loss(self._model)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise InvalidArgument(f"the loss is {_what(value)}, expected a tensor of one element that has a gradient")
        forward = self._take_spans(begin, every_event=True)
        begin = self._now()
        value.backward()
        return forward, self._take_spans(begin, every_event=False)

    def _take_spans(self, begin: float, every_event: bool) -> dict[str, float]:
        """Cuts the time since ``begin`` at the events, or at each layer's last one; the last layer gets the rest."""
        end = self._now()
        events = self._events if every_event else sorted(dict(self._events).items(), key=lambda event: event[1])
        spans: dict[str, float] = {}
        for layer, at in events:
            spans[layer] = spans.get(layer, 0.0) + at - begin
            begin = at
        if events:
            spans[events[-1][0]] += end - begin
        self._events = []
        return spans

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _what(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{value!r} of type {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}" if value.numel() != 1 else "a tensor that needs no gradient"


def _dtype_of(layer: str, parameters: Sequence[torch.nn.Parameter]) -> str:
    names = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
    if len(names) > 1 or names[0] not in _DTYPES:
        raise InvalidArgument(
            f"parameters of layer {layer!r} are {' and '.join(names)}; a profile holds layers whose parameters are all "
            f"{', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}: convert them, or freeze what is not trained"
        )
    return names[0]


def _device_of(model: torch.nn.Module) -> str:
    device = next(parameter.device for parameter in model.parameters())
    is_cuda = device.type == "cuda"
    where = torch.cuda.get_device_name(device) if is_cuda else f"a CPU, {torch.get_num_threads()} threads"
    return f"recorded on {where}, torch {torch.__version__}"

"""Models of a given number of parameters, with data, for the training benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import torch

VOCABULARY = 256


class ByteTransformer(torch.nn.Module):
    """A byte-level causal transformer; the defaults have 25.6 million parameters."""

    def __init__(self, width: int = 512, num_layers: int = 8, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.position = torch.nn.Parameter(torch.randn(context, width) * 0.02)
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embed(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.layers(hidden, mask=mask, is_causal=True))

    def loss(self, model: torch.nn.Module, rank: int, step: int, batch: int) -> torch.Tensor:
        """Returns the cross-entropy of `model` (this module, wrapped or not) on data of this rank and step."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(VOCABULARY, (batch, self.context + 1), generator=generator)
        logits = model(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def byte_transformer() -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    """Returns a model and a function that runs one forward and returns the loss, for `bagua bench record`."""
    model = ByteTransformer()
    return model, lambda wrapped: model.loss(wrapped, rank=0, step=0, batch=8)


class WideLayers(torch.nn.Module):
    """A stack of square linear layers with `num_bytes` of float32 parameters and little to compute.

    If `is_reversed`, they are used from last to first, which a wrapper does not expect.
    """

    def __init__(self, num_bytes: int, width: int = 2048, is_reversed: bool = False) -> None:
        super().__init__()
        self.width = width
        self.is_reversed = is_reversed
        count = max(1, round(num_bytes / (4 * width * width)))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))
        self.skipped: int | None = None  # a layer that does not contribute to the output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(enumerate(self.layers))
        for index, layer in reversed(layers) if self.is_reversed else layers:
            if index != self.skipped:
                x = torch.relu(layer(x))
        return x

    def loss(self, model: torch.nn.Module, rank: int, step: int, batch: int) -> torch.Tensor:
        """Returns the mean square of the outputs, for inputs of this rank and step."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return model(torch.randn(batch, self.width, generator=generator)).square().mean()


class _Bottleneck(torch.nn.Module):
    """A block of three convolutions with a shortcut (arXiv 1512.03385, figure 5 right)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.layers = torch.nn.Sequential(
            *_convolution(inputs, width, 1),
            torch.nn.ReLU(),
            *_convolution(width, width, 3, stride),
            torch.nn.ReLU(),
            *_convolution(width, outputs, 1),
        )
        is_same = inputs == outputs and stride == 1
        self.around = torch.nn.Identity() if is_same else torch.nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x) + self.around(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[torch.nn.Module]:
    convolution = torch.nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, torch.nn.BatchNorm2d(outputs)]


class ResNet(torch.nn.Sequential):
    """ResNet-50 (arXiv 1512.03385) for images of 3 channels: 25.6 million parameters with the defaults."""

    def __init__(self, width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3), num_classes: int = 1000) -> None:
        layers = [*_convolution(3, width, 7, 2), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1)]
        inputs = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(_Bottleneck(inputs, width << stage, stride))
                inputs = 4 * (width << stage)
        head = torch.nn.Linear(inputs, num_classes)
        super().__init__(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), head)


def gradient_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of all gradients."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)

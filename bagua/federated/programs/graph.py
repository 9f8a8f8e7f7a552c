"""A federated program as data: a graph of verbs, with the client functions as graphs of one client.

A graph is called as the program that it was traced from, on one process or on ranks, under vmap or in another trace. It
has no derivatives: those are traced of the function. It can be printed, drawn, saved and loaded; rounds.py counts what
it sends, platform.py runs it where clients are somewhere else.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from bagua.errors import InvalidArgument
from bagua.federated.verbs import operators, verbs
from bagua.federated.verbs.as_it_is import run_code
from bagua.federated.verbs.placement import current, program

SERVER = "server"
EVERYWHERE = "everywhere"  # constants, which clients have with the graph
BROADCAST, MAP = "broadcast", "map"
REDUCTIONS = ("reduce_sum", "reduce_mean")


@dataclass(eq=False)
class Value:
    """An input, or a result of a node.

    Attributes:
        shape: without the clients' axis.
        placement: "server", "everywhere", or the name of the clients.
        axis: of the clients, in what torch's operators see; None at the server.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str
    axis: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of one client, or of the server."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


class NumClients(NamedTuple):
    """A number in the arguments of an operator: the clients of that name where it runs."""

    placement: str


@dataclass(eq=False)
class Node:
    """A verb, or an operator of torch.

    Attributes:
        verb: "broadcast", "map", "reduce_sum", "reduce_mean", or "" for an operator.
        target: the operator's name, such as "aten.add.Tensor", or that of a map's client function.
        args, kwargs: of Values, numbers, NumClients, and what else operators take; a verb's args are Values.
        results: None for what the operator leaves out.
        placement: the clients of a verb.
        randomness: of a map, as of map_fn.
    """

    verb: str
    target: str
    args: tuple
    kwargs: dict[str, Any]
    results: list[Value | None]
    placement: str = ""
    randomness: str = "error"

    @property
    def inputs(self) -> list[Value]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)]

    @property
    def results_placement(self) -> str:
        """The placement of its results."""
        return next(filter(None, self.results)).placement

    @property
    def title(self) -> str:
        return {MAP: f"map {self.target}", "": self.target.removesuffix(".default")}.get(self.verb, self.verb)

    def __str__(self) -> str:
        arguments = [_text(arg) for arg in self.args] + [f"{key}={_text(arg)}" for key, arg in self.kwargs.items()]
        results = [result.name if result else "_" for result in self.results]
        return f"{', '.join(results)} = {self.title}({', '.join(arguments)})"


def _kind(constant: torch.Tensor) -> str:
    """Ranks may have values of their own, and as many as they need."""
    return f"{constant.dtype} of {constant.dim()} axes"


def _text(argument: Any) -> str:
    if isinstance(argument, Value):
        return argument.name
    if isinstance(argument, NumClients):
        return f"num_{argument.placement}"
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_text, argument))}]"
    return str(argument)


@dataclass(eq=False)
class Graph:
    """Nodes in an order in which they can run. Made by ``federated.trace`` and ``Graph.load``.

    Attributes:
        name: of the traced function.
        inputs: by leaf of the arguments.
        outputs: by leaf of what it returns: Values, or what is no tensor.
        structures: of the arguments and of what is returned; None for traced client functions, whose are flat.
        constants: tensors that the function took from around it, by name.
        placements: how many clients there are, by name.
        functions: the client functions of the maps, by name.
        programs: by name of clients, what puts them in force where the graph is called.
        fingerprint: of what it computes; "" of client functions, and of what was made of a graph.
        installed: of a client function that is code, the function, by its name; a file has none.
    """

    name: str
    inputs: list[Value]
    nodes: list[Node]
    outputs: list[Any]
    structures: tuple[Any, Any] | None = None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    placements: dict[str, int] = field(default_factory=dict)
    functions: dict[str, Graph] = field(default_factory=dict)
    programs: dict[str, Callable] = field(default_factory=dict)
    fingerprint: str = field(default="", init=False)
    installed: dict[str, Callable] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """The name of the function that it calls, where it is no graph but code that runs as it is."""
        return self.nodes[0].target.removeprefix(CODE) if self.nodes and self.nodes[0].target.startswith(CODE) else ""

    def install(self, functions: Mapping[str, Callable]) -> None:
        """Takes the code of client functions from these.

        Raises:
            InvalidArgument: one is not among them.
        """
        if self.code and self.code not in functions:
            known = ", ".join(map(repr, functions)) or "none"
            raise InvalidArgument(
                f"a graph that calls the client's own function {self.code!r}, but this client has {known}: give it, as "
                f"in Client({{{self.code!r}: {self.code}}}, ...)"
            )
        self.installed = {self.code: functions[self.code]} if self.code else {}
        for function in self.functions.values():
            function.install(functions)

    # ---- as a function

    @torch.compiler.disable  # which would compile our interpreter, node by node
    def __call__(self, *args: Any) -> Any:
        """Returns what the traced function returns for such arguments.

        Args:
            args: of the structure, shapes and dtypes of those that it was traced with; placed values are ``[num_local,
                ...]``, for this rank's clients.

        Raises:
            InvalidArgument: for others, and what the verbs raise.
        """
        try:
            leaves = self.structures[0].flatten_up_to(args)  # keys of dictionaries in any order
        except ValueError:
            raise InvalidArgument(
                f"{self.name} was traced with arguments of structure {self.structures[0]}, but got "
                f"{pytree.tree_structure(args)}"
            ) from None
        return pytree.tree_unflatten(self._in_programs(leaves), self.structures[1])

    def _in_programs(self, leaves: Sequence[torch.Tensor]) -> list:
        run = functools.partial(self.run, leaves)
        for name, size in self.placements.items():
            run = functools.update_wrapper(functools.partial(run), self.run)
            run.__qualname__ = self.name
            run = self.programs.get(name, program)(run, **{name: size})
        return run()

    def run(self, leaves: Sequence[Any]) -> list:
        """The leaves of what the function returns, inside of its programs."""
        for value, leaf in zip(self.inputs, leaves, strict=True):
            self._check(value, leaf)
        if self.structures:  # of client functions the graph around them has done so
            leaves = _Underived.apply(self.name, *leaves)
        known: dict[Value, Any] = dict(zip(self.inputs, leaves, strict=True))
        for node in self.nodes:
            known.update(zip(node.results, self.compute(node, known), strict=True))
        return [known[output] if isinstance(output, Value) else output for output in self.outputs]

    def compute(self, node: Node, known: dict[Value, Any]) -> Sequence[torch.Tensor]:
        """Computes a node, by the verbs of the program that runs."""
        if not node.verb:
            return self.compute_operator(node, known, lambda name: current(name, "a traced operator").num_local)
        values = [known[value] for value in node.args]
        if node.verb == BROADCAST:
            return verbs.broadcast(values, placement=node.placement)
        if node.verb == MAP:
            function, placement = self.functions[node.target], node.placement
            if function.code:
                arguments = pytree.tree_unflatten(values, function.structures[0])
                mapped = verbs.map_fn(function.installed_code(), arguments, vectorize=False, placement=placement)
                return function.checked(pytree.tree_leaves(mapped), has_axis=True)
            client = function.as_client_function()
            return list(verbs.map_fn(client, tuple(values), randomness=node.randomness, placement=placement))
        # Ranks compare these names, and see that they run one graph.
        named = {
            f"graph {self.name}, digest {self.fingerprint}, value {index}": value for index, value in enumerate(values)
        }
        return list(getattr(verbs, node.verb)(named, placement=node.placement).values())

    def compute_operator(
        self, node: Node, known: dict[Value, Any], num_clients: Callable[[str], int]
    ) -> Sequence[torch.Tensor]:
        """Computes an operator of torch, or returns a constant."""
        if node.target in self.constants:
            return [self.constants[node.target]]
        if node.target.startswith(CODE):
            values = [known[value] for value in node.args]
            return self.checked(run_code(self.installed_code(), values, self.structures[0]))

        def given(argument: Any) -> Any:
            if isinstance(argument, Value):
                return known[argument]
            return num_clients(argument.placement) if isinstance(argument, NumClients) else argument

        args, kwargs = pytree.tree_map(given, (node.args, node.kwargs), is_leaf=lambda x: isinstance(x, NumClients))
        if node.target == CHECK_TOTAL:
            return operators.call(
                "check_total", list(args), current(node.placement or None, "reduce_weighted_mean").key
            )
        result = operator_of(node.target)(*args, **kwargs)
        return [result] if isinstance(result, torch.Tensor) else result

    def installed_code(self) -> Callable:
        """The function that it calls. Raises InvalidArgument if none is installed."""
        if not self.installed:
            raise InvalidArgument(
                f"a graph that calls the function {self.code!r}, which was not saved with it: install it, by "
                f"graph.install({{{self.code!r}: {self.code}}})"
            )
        return self.installed[self.code]

    def checked(self, results: Sequence[torch.Tensor], *, has_axis: bool = False) -> Sequence[torch.Tensor]:
        """Returns what code has returned. Raises InvalidArgument if it is not as where it was traced."""
        got = [str(Value("", tuple(one.shape[has_axis:]), one.dtype, SERVER)) for one in results]
        expected = list(map(str, self.nodes[0].results))
        if got != expected:
            raise InvalidArgument(
                f"the client function {self.code} returns {', '.join(got)}, but was traced with {', '.join(expected)}"
            )
        return results

    def as_client_function(self) -> Callable[..., tuple]:
        """Returns a function of one client's leaves to its results."""

        def client(*leaves: torch.Tensor) -> tuple:
            return tuple(self._in_programs(leaves))

        client.__name__ = self.name
        return client

    def _check(self, value: Value, leaf: Any) -> None:
        shape = leaf.shape if isinstance(leaf, torch.Tensor) else None
        if shape is not None and value.placement != SERVER and len(shape):
            shape = shape[1:]  # the verbs look at the clients' axis
        if shape is None or tuple(shape) != value.shape or leaf.dtype != value.dtype:
            got = f"{leaf.dtype} of shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
            clients = "" if value.placement == SERVER else f" for each of this rank's {value.placement}"
            raise InvalidArgument(f"{self.name} was traced for {value.name}: {value}{clients}, but got {got}")

    def numbers(self) -> dict[Value, int]:
        """Returns all values, inputs first, in their order."""
        results = [result for node in self.nodes for result in node.results if result]
        return {value: number for number, value in enumerate([*self.inputs, *results])}

    def signed(self) -> Graph:
        """The graph itself, with its fingerprint; not to be changed from here on."""
        computed = [value.name for value in self.inputs], self.signature(_kind, lambda device: device.type)
        self.fingerprint = hashlib.sha256(repr(computed).encode()).hexdigest()[:12]
        return self

    def signature(
        self, constant: Callable[[torch.Tensor], Any] = id, device: Callable[[torch.device], Any] = str
    ) -> tuple:
        """Equal for graphs that compute the same in the same way, whatever their values are called.

        Args:
            constant, device: what stands for one, and has to be equal.
        """
        numbers = self.numbers()

        def token(argument: Any) -> Any:
            if isinstance(argument, Value):
                return ("value", numbers[argument])
            if isinstance(argument, (list, tuple)) and not isinstance(argument, NumClients):
                return tuple(map(token, argument))
            if isinstance(argument, torch.device):
                return ("device", device(argument))
            return (type(argument).__name__, str(argument))

        def target(node: Node) -> Any:
            if node.verb == MAP:
                return self.functions[node.target].signature(constant, device)
            return constant(self.constants[node.target]) if node.target in self.constants else node.target

        nodes = tuple(
            (node.verb, target(node), token(node.args), token(list(node.kwargs.items())), node.randomness)
            for node in self.nodes
        )
        structures = self.structures if self.code else None  # in which code gets its leaves
        return tuple(map(str, self.inputs)), nodes, token(self.outputs), tuple(self.placements.items()), structures

    # ---- for readers

    def verbs(self) -> list[str]:
        """The verbs that communicate, in their order."""
        return [node.verb for node in self.nodes if node.verb and node.verb != MAP]

    def __str__(self) -> str:
        over = " and ".join(f"{size} {name}" for name, size in self.placements.items())
        is_whole = self.structures and not self.code
        lines = [f"{self.name} over {over}:" if is_whole else f"{self.name}, of one client:"]
        rows = [(f"{value.name}", value) for value in self.inputs]
        rows += [(str(node), next(filter(None, node.results))) for node in self.nodes]
        width = min(max((len(text) for text, _ in rows), default=0), 72)
        for text, value in rows:
            where = f" at {value.placement}" if is_whole else ""
            lines.append(f"    {text:<{width}}  # {value}{where}")
        lines.append(f"    return {', '.join(_text(output) for output in self.outputs)}")
        for function in self.functions.values():
            lines += ["", str(function)]
        return "\n".join(lines)

    def to_dot(self) -> str:
        """Graphviz text: the server's and the clients' nodes in a box each, what is sent as bold edges."""
        members: dict[str, list[str]] = {}
        lines = [f"digraph {_quoted(self.name)} {{", "  rankdir=LR; node [shape=box];"]
        source: dict[Value, str] = {}
        edges = []
        for value in self.inputs:
            source[value] = value.name
            members.setdefault(value.placement, []).append(f"{_quoted(value.name)} [shape=ellipse];")
        for index, node in enumerate(self.nodes):
            name = f"{index}"
            members.setdefault(node.results_placement, []).append(f"{_quoted(name)} [label={_quoted(node.title)}];")
            is_sent = node.verb in (BROADCAST, *REDUCTIONS)
            for value in dict.fromkeys(node.inputs):
                style = ", style=bold" if is_sent else ""
                edges.append(f"{_quoted(source[value])} -> {_quoted(name)} [label={_quoted(str(value))}{style}];")
            source.update((result, name) for result in node.results)
        members.setdefault(SERVER, []).append('"return" [shape=ellipse];')
        edges += [f'{_quoted(source[value])} -> "return";' for value in self.outputs if isinstance(value, Value)]
        for number, (placement, lines_inside) in enumerate(members.items()):
            lines.append(f"  subgraph cluster_{number} {{ label={_quoted(placement)};")
            lines += [f"    {line}" for line in lines_inside]
            lines.append("  }")
        return "\n".join([*lines, *(f"  {edge}" for edge in edges), "}"])

    # ---- files

    def save(self, path: Any) -> None:
        """Writes it to a file that ``Graph.load`` reads; see to_bytes."""
        from bagua.federated.programs.graph_files import to_bytes

        with open(path, "wb") as file:
            file.write(to_bytes(self))

    @staticmethod
    def load(path: Any) -> Graph:
        """The graph that was saved there. Nothing but operators of torch and the verbs can be in it: none is run here.

        Where it is called, some of these operators trust indices and sizes that they are given: load only from whom you
        trust (docs/federated.md says more).

        Raises:
            InvalidArgument: it is no such file.
        """
        from bagua.federated.programs.graph_files import from_bytes

        with open(path, "rb") as file:
            return from_bytes(file.read())


CODE = "client."  # what the names of functions that clients have installed begin with, among those of operators
# Beside torch's own operators. The latter are what aggregators compute at one client and at the server.
CHECK_TOTAL = f"{operators.NAMESPACE}.check_total.default"
OF_AGGREGATORS = tuple(f"{operators.NAMESPACE}.{name}.default" for name in ("code", "noise"))


def refusal(operator: Any) -> str:
    """Returns why an operator may not be in a graph, or "" if it may: it computes new tensors, and does nothing else.

    Not by name alone, since torch.ops has what TorchScript needs, too, such as aten.save. That says nothing of what it
    is called with: see refusal_of_call.
    """
    target = str(operator)
    if target in (CHECK_TOTAL, *OF_AGGREGATORS):
        return ""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace not in ("aten", "prims"):
        return "which is neither of torch's own operators (aten, prims) nor a verb"
    schema = operator._schema
    name = name_of(target)
    if schema.is_mutable or (name.endswith("_") and not name.endswith("__")):  # some schemas do not say so
        return "which writes into its arguments"
    if target == "aten._local_scalar_dense.default":
        return "which makes a number of a tensor, such as by .item(), and only shapes are known: keep it a tensor"
    if not schema.returns or any(str(one.type) not in ("Tensor", "List[Tensor]") for one in schema.returns):
        return "which gives something else than tensors"
    names = {argument.name for argument in schema.arguments}
    if names & {"storage_offset", "storage"} or {"size", "stride"} <= names:
        return "which depends on how tensors lie in memory: use .reshape() or .contiguous()"
    if names & {"filename"} or any(word in target for word in _WITHOUT_VALUES):
        return "which reads a file, or memory that has no values of the program"
    if name.startswith("_") and name not in _INTERNAL:
        return "which is internal to torch, and none of those that traces of models make: write it in public operators"
    return ""


_WITHOUT_VALUES = ("empty", "resize", "sparse", "quantized", "nested", "fbgemm")

# The operators with names that begin with "_" that public functions of torch 2.9 to 2.14 and their derivatives
# run, but for the derivative of segment_reduce, which trusts lengths that are not checked. All others are refused:
# they are for sparse, nested and quantized tensors, for one kind of device, for torch.optim, for generators of random
# numbers, for transforms, or trust indices, too. Where a new torch has a new one, tracing names it.
_INTERNAL = frozenset({
    "__and__", "__lshift__", "__or__", "__rshift__", "__xor__", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "_addmm_activation",
    "_batch_norm_no_update", "_batch_norm_with_update_functional", "_cdist_backward", "_cdist_forward",
    "_cholesky_solve_helper", "_compute_linear_combination", "_conj", "_conj_copy", "_conj_physical",
    "_conv_depthwise2d", "_convolution", "_convolution_double_backward", "_cudnn_rnn", "_cudnn_rnn_backward",
    "_cudnn_rnn_flatten_weight", "_dirichlet_grad", "_efficientzerotensor", "_embedding_bag",
    "_embedding_bag_backward", "_embedding_bag_dense_backward", "_embedding_bag_forward_only",
    "_embedding_bag_per_sample_weights_backward", "_euclidean_dist", "_fake_quantize_learnable_per_channel_affine",
    "_fake_quantize_learnable_per_channel_affine_backward", "_fake_quantize_learnable_per_tensor_affine",
    "_fake_quantize_learnable_per_tensor_affine_backward",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "_fft_c2c", "_fft_c2r", "_fft_r2c",
    "_foreach_norm", "_fused_rms_norm", "_fused_rms_norm_backward", "_grouped_mm", "_histogramdd_bin_edges",
    "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors", "_is_all_true", "_is_any_true", "_linalg_det",
    "_linalg_eigh", "_linalg_eigvals", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "_log_softmax",
    "_log_softmax_backward_data", "_logcumsumexp", "_lu_with_info", "_masked_softmax", "_masked_softmax_backward",
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    "_native_multi_head_attention", "_neg_view", "_neg_view_copy", "_new_zeros_with_same_feature_meta",
    "_pdist_backward", "_pdist_forward", "_prelu_kernel", "_prelu_kernel_backward", "_reshape_copy",
    "_safe_softmax", "_sample_dirichlet", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_softmax", "_softmax_backward_data", "_stack", "_standard_gamma", "_standard_gamma_grad",
    "_thnn_differentiable_gru_cell_backward", "_thnn_differentiable_lstm_cell_backward", "_thnn_fused_gru_cell",
    "_thnn_fused_gru_cell_backward", "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward",
    "_thnn_fused_lstm_cell_backward_impl", "_to_copy", "_transform_bias_rescale_qkv",
    "_transformer_encoder_layer_fwd", "_trilinear", "_unique", "_unique2", "_unsafe_index", "_unsafe_index_put",
    "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "_unsafe_view", "_upsample_bicubic2d_aa",
    "_upsample_bicubic2d_aa_backward", "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward",
    "_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa_backward", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact1d_backward", "_upsample_nearest_exact2d", "_upsample_nearest_exact2d_backward",
    "_upsample_nearest_exact3d", "_upsample_nearest_exact3d_backward", "_weight_norm",
    "_weight_norm_differentiable_backward", "_weight_norm_interface", "_weight_norm_interface_backward",
})  # fmt: skip

# Operators that write into running_mean and running_var, though their schemas do not say so, and the argument without
# which they do not; None for always.
_UPDATING = {
    "batch_norm": "training",
    "native_batch_norm": "training",
    "cudnn_batch_norm": "training",
    "miopen_batch_norm": "training",
    "instance_norm": "use_input_stats",
    "batch_norm_update_stats": None,
    "batch_norm_gather_stats": None,
    "batch_norm_gather_stats_with_counts": None,
}


def refusal_of_call(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], before: Sequence[Node]) -> str:
    """Returns why an operator may not be called like that in a graph, or "" if it may.

    Args:
        args, kwargs: with Values for tensors.
        before: the nodes that run earlier.
    """
    arguments = operator._schema.arguments
    given = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
    name = name_of(str(operator))
    # Not only True: torch takes what is not a bool for one.
    if given.get("unsafe", False) is not False or (name == "segment_reduce" and given.get("offsets") is not None):
        return "with indices that it does not check, so that it would read memory beyond its arguments: give lengths"
    if name in _UPDATING and (_UPDATING[name] is None or given.get(_UPDATING[name]) is not False):
        for statistics in ("running_mean", "running_var"):
            if given.get(statistics) is not None and not _is_new(given[statistics], before):
                return f"which writes into its {statistics}: clone it first, and return new values"
    return ""


def _is_new(value: Any, nodes: Sequence[Node]) -> bool:
    """Returns True if a value is in memory that an operator has made here, or a view of such a one is."""
    makers = {result: node for node in nodes for result in node.results}
    while True:
        made = makers.get(value) if isinstance(value, Value) else None
        if made is None or made.verb or "." not in made.target:  # an input, or what has other results or constants
            return False
        operator = operator_of(made.target)
        if all(one.alias_info is None for one in operator._schema.returns):
            return torch.Tag.core in operator.tags  # of which schemas say where they give views
        arguments = zip(made.args, operator._schema.arguments, strict=False)
        viewed = [given for given, one in arguments if one.alias_info is not None]
        if len(viewed) != 1:
            return False
        (value,) = viewed


def name_of(target: str) -> str:
    """Such as "add" for "aten.add.Tensor"."""
    return target.split(".")[1]


def operator_of(target: str) -> Any:
    """The operator of a name such as "aten.add.Tensor".

    Raises:
        InvalidArgument: this torch has none of that name, or it may not be in a graph.
    """
    namespace, name, overload = [*target.split("."), "", ""][:3]
    operator = None
    if namespace in ("aten", "prims", operators.NAMESPACE) and target.count(".") == 2:
        operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if operator is None:
        raise InvalidArgument(f"a graph of the operator {target!r}, which torch {torch.__version__} does not have")
    if why := refusal(operator):
        raise InvalidArgument(f"a graph of the operator {target!r}, {why}")
    return operator


def leaf_name(argument: str, path: tuple) -> str:
    """The name of a leaf of an argument in a graph, such as "params_weight"."""
    rest = "".join(c if c.isalnum() else "_" for c in pytree.keystr(path)).strip("_")
    return f"{argument}_{rest}" if rest else argument


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class _Underived(torch.autograd.Function):
    """The values, without derivatives: a graph has neither torch.no_grad nor functions with their own derivatives."""

    @staticmethod
    def forward(name: str, *values: torch.Tensor) -> tuple:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, outputs: tuple) -> None:
        ctx.name = inputs[0]
        ctx.mark_non_differentiable(*(x for x in outputs if not (x.is_floating_point() or x.is_complex())))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *derivatives: torch.Tensor | None) -> tuple:
        if all(one is None for one in derivatives):
            return (None, *derivatives)
        raise InvalidArgument(
            f"a derivative of the graph {ctx.name}, which has none: trace the derivative of the function that it was "
            "traced from, such as trace(grad(f), ...)"
        )

    @staticmethod
    def jvp(ctx: Any, name: None, *tangents: torch.Tensor | None) -> tuple:
        return _Underived.backward(ctx, *tangents)[1:]

    @staticmethod
    def vmap(info: Any, dims: tuple, name: str, *values: torch.Tensor) -> tuple:
        return _Underived.apply(name, *values), dims[1:]


# ---- dead nodes


def without_dead_nodes(graph: Graph) -> Graph:
    """Only what outputs depend on: reductions of which nothing is used are not sent, nor computed by clients."""
    needed = {output for output in graph.outputs if isinstance(output, Value)}
    nodes: list[Node] = []
    functions: dict[str, Graph] = {}
    for node in reversed(graph.nodes):
        used = [result in needed for result in node.results]
        if not any(used):
            continue
        if node.verb == MAP:
            function, kept = _narrowed(graph.functions[node.target], used)
            name = _name_for(function, functions)
            results = [result for result, is_used in zip(node.results, used, strict=True) if is_used]
            node = replace(node, target=name, args=tuple(node.args[i] for i in kept), results=results)
        elif node.verb:
            pairs = [(a, r) for a, r, is_used in zip(node.args, node.results, used, strict=True) if is_used]
            node = replace(node, args=tuple(a for a, _ in pairs), results=[r for _, r in pairs])
        needed.update(node.inputs)
        nodes.append(node)
    nodes.reverse()
    constants = {
        name: graph.constants[name] for name in dict.fromkeys(n.target for n in nodes) if name in graph.constants
    }
    return replace(graph, nodes=nodes, functions=dict(reversed(functions.items())), constants=constants)


def _narrowed(function: Graph, used: list[bool]) -> tuple[Graph, list[int]]:
    """A client function with those outputs only, and which of its inputs they need; at least one."""
    outputs = [output for output, is_used in zip(function.outputs, used, strict=True) if is_used]
    narrow = without_dead_nodes(replace(function, outputs=outputs))
    needed = {value for node in narrow.nodes for value in node.inputs} | set(filter(_is_value, outputs))
    kept = [i for i, value in enumerate(narrow.inputs) if value in needed] or [0]
    return replace(narrow, inputs=[narrow.inputs[i] for i in kept]), kept


def _is_value(output: Any) -> bool:
    return isinstance(output, Value)


def _name_for(function: Graph, functions: dict[str, Graph]) -> str:
    """The name under which it is among the functions: another's where it is the same but for names."""
    name, number = function.name, 1
    while name in functions and functions[name].signature() != function.signature():
        number += 1
        name = f"{function.name}_{number}"
    functions[name] = replace(function, name=name)
    return name

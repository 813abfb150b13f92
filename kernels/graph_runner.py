"""Runs functions of tensors as CUDA graphs over static buffers in a few padded shapes, or eagerly if no captured shape
fits; sends numbers from the host through pinned memory.

Without a CUDA device, a capture calls the computation again on the same buffers, so that tests on a CPU cover padding
and copying."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

HIGH_PRIORITY = -1
"""Priority of the CUDA stream that serving uses; training uses 0."""

BATCHES = (1, 2, 4, 8, 16, 32)
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a computation at least once, and returns a function that repeats it on the same tensors."""

_FITS = 256
"""Number of input sizes for which the fitting shape is cached."""
Sizes = tuple[tuple[int, ...], ...]
Out = TypeVar("Out")


def rerun(compute: Callable[[], None]) -> Callable[[], None]:
    """Capture for devices without CUDA graphs: repeats a computation by calling it again."""
    compute()
    return compute


class CudaGraphs:
    """Captures computations as CUDA graphs. All graphs share one memory pool, since no two run at once, and one stream,
    whose priority the captured kernels keep."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Record a computation as a graph, and return the function that replays it."""
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            compute()  # libraries choose their algorithms and allocate their workspaces in the first run on a stream
        main.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with (
            _garbage_kept(),
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
        ):
            compute()
        return graph.replay


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Disable garbage collection inside the block: freeing a graph while another is captured breaks the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def capture_for(device: torch.device) -> Capture:
    """Return the capture function of a device: CUDA graphs, or `rerun` on a CPU."""
    return CudaGraphs(device).capture if device.type == "cuda" else rerun


class GraphRunner(Generic[Out]):
    """Runs one function as a captured graph of the smallest shape that fits, or eagerly if none fits.

    `inputs` are copied to static buffers; `given` values are in static buffers already, such as another runner's
    results. Both are nested tuples of tensors and ints. A captured shape fits a call if none of its sizes and ints is
    smaller, and if the given tensors have the captured addresses. Results of a captured run are padded, and the next
    call overwrites them.
    """

    def __init__(
        self,
        function: Callable[..., Out],
        capture: Capture | None = None,
        shapes: Iterable[tuple[tuple[Any, ...], tuple[Any, ...]]] = (),
    ) -> None:
        """`function(*inputs, *given)`; `shapes`: pairs of padded inputs and given values, the largest first."""
        self._function = function
        self._captured: list[_Captured[Out]] = []
        if capture is not None:
            inputs, results = _Buffers(), _Buffers()
            with torch.inference_mode():
                self._captured = [_Captured(function, capture, *shape, inputs, results) for shape in shapes]
        self._fit = lru_cache(maxsize=_FITS)(partial(_smallest, self._captured))
        self._padded: _Fit[Out] | None = None  # the fit whose padding the buffers hold

    @property
    def results(self) -> list[Out]:
        """Result buffers of each captured shape, in the order of the shapes."""
        return [captured.results for captured in self._captured]

    def __call__(self, inputs: tuple[Any, ...], given: tuple[Any, ...] = ()) -> Out:
        if not self._captured:
            return self._function(*inputs, *given)
        values, standing = _leaves(inputs), _leaves(given)
        fit = self._fit(_sizes(values), _sizes(standing))
        if fit is None or not fit.captured.stands(standing):
            return self._function(*inputs, *given)
        with torch.inference_mode():
            if fit is not self._padded:
                fit.pad()
                self._padded = fit
            _copy(fit.heads, values)
            fit.captured.repeat()
        return fit.captured.results


class _Captured(Generic[Out]):
    """The function, captured in one shape."""

    def __init__(
        self,
        function: Callable[..., Out],
        capture: Capture,
        padding: tuple[Any, ...],
        given: tuple[Any, ...],
        inputs: "_Buffers",
        results: "_Buffers",
    ) -> None:
        static = inputs.of(padding)
        self.padding, self.inputs, self._given = _leaves(padding), _leaves(static), _leaves(given)
        for place, value in zip(self.inputs, self.padding, strict=True):
            if isinstance(place, Tensor):
                place.copy_(value)
        self.results: Out = results.of(function(*static, *given), besides=self.inputs)
        self._sizes, self._given_sizes = _sizes(self.padding), _sizes(self._given)

        standing = _leaves((self.results,))
        self.repeat = capture(lambda: _copy(standing, _leaves((function(*static, *given),))))

    def holds(self, sizes: Sizes, given: Sizes) -> bool:
        return _at_most(sizes, self._sizes) and _at_most(given, self._given_sizes)

    def stands(self, given: Sequence[Tensor | int]) -> bool:
        """Whether the given tensors start at the captured addresses."""
        pairs = zip(given, self._given, strict=True)
        return all(
            value is place or not isinstance(value, Tensor) or value.data_ptr() == place.data_ptr()
            for value, place in pairs
        )


class _Fit(Generic[Out]):
    """How inputs of certain sizes fill a captured shape: the views they are copied to, and the padding after them."""

    def __init__(self, captured: _Captured[Out], sizes: Sizes) -> None:
        self.captured = captured
        self.heads: list[Tensor | None] = []
        self._tails: list[tuple[Tensor, Tensor]] = []
        for place, padding, size in zip(captured.inputs, captured.padding, sizes, strict=True):
            if not isinstance(place, Tensor):
                self.heads.append(None)
                continue
            head = tuple(map(slice, size))
            self.heads.append(place[head])
            for axis, count in enumerate(size):
                if count < place.shape[axis]:
                    tail = (*head[:axis], slice(count, None))
                    self._tails.append((place[tail], padding[tail]))

    def pad(self) -> None:
        for place, padding in self._tails:
            place.copy_(padding)


def _smallest(captured: Sequence[_Captured[Out]], sizes: Sizes, given: Sizes) -> _Fit[Out] | None:
    """Find the smallest shape that fits these sizes; None if there is none."""
    holding = next((shape for shape in reversed(captured) if shape.holds(sizes, given)), None)
    return None if holding is None else _Fit(holding, sizes)


class _Buffers:
    """Static buffers shared by all shapes: each shape uses the leading part of the largest shape's buffers. The largest
    shape must come first."""

    def __init__(self) -> None:
        self._largest: list[Any] = []

    def of(self, values: Any, besides: Sequence[Tensor | int] = ()) -> Any:
        """Return buffers for values like these; values in `besides` are buffers already, and are returned as they
        are."""
        leaves, structure = pytree.tree_flatten(values)
        self._largest = self._largest or [torch.zeros_like(x) if isinstance(x, Tensor) else x for x in leaves]
        places = [
            leaf
            if not isinstance(leaf, Tensor) or any(leaf is x for x in besides)
            else place[tuple(map(slice, leaf.shape))]
            for place, leaf in zip(self._largest, leaves, strict=True)
        ]
        return pytree.tree_unflatten(places, structure)


def _copy(places: Sequence[Any], values: Sequence[Any]) -> None:
    """Copy values to their buffers. Contiguous values of one type are copied by a single launch, which needs them
    flattened."""
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(places, values, strict=True):
        if not isinstance(place, Tensor) or place is value or not place.numel():
            continue
        if place.is_contiguous() and value.is_contiguous() and place.dtype == value.dtype:
            held = alike.setdefault(place.dtype, ([], []))
            held[0].append(place.view(-1))
            held[1].append(value.view(-1))
        else:
            place.copy_(value)
    for together in alike.values():
        torch._foreach_copy_(*together)


def by_batch(
    function: Callable[..., Out], capture: Capture | None, most: int, *paddings: tuple[Any, ...]
) -> GraphRunner[Out]:
    """Build a runner of a function whose tensors have one row per sequence, captured for batches up to `most`. Each of
    the `paddings` is a tuple of padded inputs with `most` rows."""
    shapes = ((leading(padding, batch), ()) for batch in batches_up_to(most) for padding in paddings)
    return GraphRunner(function, capture, shapes)


def leading(values: Any, count: int) -> Any:
    """Return nested tuples in which each tensor is cut to its first `count` rows."""
    return pytree.tree_map_only(Tensor, lambda value: value[:count], values)


def batches_up_to(most: int) -> list[int]:
    """List the batch sizes to capture for batches up to `most`, the largest first."""
    return [most, *(batch for batch in reversed(BATCHES) if batch < most)]


def _leaves(values: Any) -> list[Any]:
    """Flatten nested tuples and lists, in order. `pytree.tree_flatten` takes several times as long."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            found += _leaves(value)
        else:
            found.append(value)
    return found


def _sizes(values: Sequence[Tensor | int]) -> Sizes:
    return tuple(value.shape if isinstance(value, Tensor) else (int(value),) for value in values)


def _at_most(sizes: Sizes, most: Sizes) -> bool:
    return [*map(len, sizes)] == [*map(len, most)] and all(
        count <= limit
        for size, limits in zip(sizes, most, strict=True)
        for count, limit in zip(size, limits, strict=True)
    )


Numbers = Sequence[int] | Sequence[float] | npt.NDArray[np.int64] | npt.NDArray[np.float64]


def send(device: torch.device, *columns: Numbers) -> tuple[Tensor, ...]:
    """Send columns of numbers to a device as int64 tensors, in one asynchronous transfer from pinned memory; torch
    keeps the memory until the device has read it. # -> [length] each"""
    together = _sent(device, np.concatenate([np.asarray(column, dtype=np.int64) for column in columns]))
    return together.split_with_sizes([len(column) for column in columns])


def send_lines(device: torch.device, *columns: Sequence[int]) -> tuple[Tensor, ...]:
    """Send lists of equal length, as `send` does. # -> [length] each"""
    return _sent(device, np.array(columns, dtype=np.int64)).unbind()


def send_floats(device: torch.device, values: Numbers) -> Tensor:
    """Send one column of numbers as float32, as `send` does. # -> [length]"""
    return _sent(device, np.asarray(values, dtype=np.float32))


def _sent(device: torch.device, values: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> Tensor:
    here = torch.from_numpy(values)
    if device.type == "cpu":
        return here
    pinned = torch.empty(here.shape, dtype=here.dtype, pin_memory=device.type == "cuda")
    return pinned.copy_(here).to(device, non_blocking=True)

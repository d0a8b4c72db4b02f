"""Test doubles that replace a GPU on machines without one.

GraphDouble detects launches that a real CUDA graph would replay wrongly. StepGuard detects calls that make the host wait for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rootstock_llm.services.worker.exec.streams.cuda_streams import T
from rootstock_llm.services.worker.exec.streams.host_streams import HostStreams, _PassedMark

WAITS = {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal",
         "from_numpy", "tensor", "as_tensor", "masked_select", "unique", "argwhere", "allclose"}  # fmt: skip
Launch = tuple[Any, ...]


class HostWaits(AssertionError):
    """Raised if a step makes a call that reads a device value on the host, or that copies from unpinned memory."""


class Watch:
    """Records launches for GraphDouble. Calls inside a kernel are not recorded."""

    def __init__(self) -> None:
        self.inside_kernel = 0
        self.launches: list[Launch] | None = None
        self.made: set[int] = set()
        self.outside: list[StorageWeakRef] = []  # memory that launches use and that existed before the recording

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.launches is not None:
            self.launches.append((name, *map(self._seen, args), *sorted((key, self._seen(v)) for key, v in kwargs.items())))

    def _seen(self, value: Any) -> Any:
        """Returns a comparable form of an argument.

        For a tensor, the form has shape, strides, dtype and address. A tensor that the recorded work allocates gets no address.
        """
        if isinstance(value, Tensor):
            made = value.untyped_storage().data_ptr() in self.made
            if not made and value.numel():
                self.outside.append(StorageWeakRef(value.untyped_storage()))
            place = "made here" if made else value.data_ptr()
            return (place, tuple(value.shape), value.stride(), str(value.dtype))
        if isinstance(value, list | tuple):
            return tuple(map(self._seen, value))
        if hasattr(value, "__dataclass_fields__"):
            return tuple((name, self._seen(getattr(value, name))) for name in value.__dataclass_fields__)
        return str(value)


class StepGuard(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self._watch.inside_kernel and (name in WAITS or (name == "__getitem__" and _by_mask(args[1]))):
            raise HostWaits(f"a step calls {name}, so the host waits for the device")
        return func(*args, **(kwargs or {}))


def _by_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


class _Recorder(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._watch.inside_kernel:
            self._watch.note(str(func), args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if not self._watch.inside_kernel and isinstance(out, Tensor) and not _aliases(out, args):
            self._watch.made.add(out.untyped_storage().data_ptr())
        return out


def _aliases(out: Tensor, args: Any) -> bool:
    storages = [value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)]
    return out.untyped_storage().data_ptr() in storages


class WatchedKernels:
    """Wraps an object and records each call of its methods as one launch, with the method's name and arguments."""

    def __init__(self, kernels: Any, watch: Watch) -> None:
        self._kernels, self._watch = kernels, watch

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._kernels, name)

        def launch(*args: Any, **kwargs: Any) -> Any:
            if self._watch.inside_kernel:
                return function(*args, **kwargs)
            self._watch.note(name, args, kwargs)
            with self._inside():
                return function(*args, **kwargs)

        return launch

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._watch.inside_kernel += 1
        try:
            yield
        finally:
            self._watch.inside_kernel -= 1


class ReplayedOtherwise(AssertionError):
    """Raised if a replay launches other kernels than the capture, or passes other arguments to them."""


class GraphDouble:
    """Replaces a CUDA graph: runs the captured work again at each replay, and compares its launches with the captured ones."""

    def __init__(self, work: Callable[[], None], watch: Watch) -> None:
        self._work, self._watch = work, watch
        self._captured = self._launches()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        launches = self._launches()
        for number, (was, now) in enumerate(zip(self._captured, launches, strict=False)):
            if was != now:
                raise ReplayedOtherwise(f"launch {number} was captured as {was}; at the replay it is {now}")
        if len(launches) != len(self._captured):
            raise ReplayedOtherwise(f"{len(self._captured)} launches were captured; at the replay there are {len(launches)}")

    def _launches(self) -> list[Launch]:
        self._watch.launches, self._watch.made, self._watch.outside = [], set(), []
        try:
            with StepGuard(self._watch), _Recorder(self._watch):
                self._work()
            return self._watch.launches
        finally:
            self._watch.launches = None


class GraphMemoryDouble:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.graphs: list[GraphDouble] = []

    def capture(self, work: Callable[[], None]) -> GraphDouble:
        work()
        self.graphs.append(GraphDouble(work, self._watch))
        return self.graphs[-1]

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)


class ForgetfulGraph:
    def replay(self) -> None:
        return


class ForgetfulMemory:
    """Replaces graph memory. Like a real CUDA graph, a captured graph stores only addresses, so the memory may be freed."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.named: list[StorageWeakRef] = []

    def capture(self, work: Callable[[], None]) -> ForgetfulGraph:
        GraphDouble(work, self._watch)
        self.named += self._watch.outside
        return ForgetfulGraph()

    def freed(self) -> int:
        """Returns the number of captured addresses whose memory was freed."""
        return sum(ref.expired() for ref in self.named)


class InlineStreams(HostStreams):
    """Streams that imitate a GPU.

    They run the work of launch() immediately, and the work of collect() when its value is requested. Host and device memory are
    separate, so that a value can be read on the host only after a copy.
    """

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._nothing, self._past = nullcontext(), _PassedMark()

    @property
    def on_host(self) -> bool:
        return False

    def launch(self, work: Callable[[], None]) -> None:
        with torch.inference_mode():
            work()

    def collect(self, work: Callable[[], T]) -> Callable[[], T]:
        def collected() -> T:
            with torch.inference_mode():
                return work()

        return collected

    def close(self) -> None:
        return

    def staging(self, num_words: int) -> tuple[Tensor, Tensor]:
        return torch.empty(num_words, dtype=torch.int32), torch.empty(num_words, dtype=torch.int32)

    def to_host(self, source: Tensor) -> Tensor:
        return source.clone()

    def synchronize(self) -> None:
        return

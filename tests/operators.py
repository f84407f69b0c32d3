"""The operators that code asks of a device; on a GPU each but a view launches a kernel."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

WITHOUT_A_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "lift_fresh",
}  # fmt: skip
WITHOUT_A_KERNEL |= {"_record_function_enter_new", "_record_function_exit"}
WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
"""Operators whose answer the host looks at."""


class Operators(TorchDispatchMode):
    """The operators that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.launched: Counter[str] = Counter()
        """Without views, and memory that is only taken."""
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        name = func.overloadpacket.__name__
        self.names.append(name)
        if func.namespace == "c10d":
            self.collectives[name] += 1
        elif not (func.is_view or name in WITHOUT_A_KERNEL):
            self.launched[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> Counter[str]:
        """Those for which the host waits for a GPU."""
        return Counter(name for name in self.names if name in WAITS)

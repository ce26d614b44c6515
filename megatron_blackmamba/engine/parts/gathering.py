"""Refuse a model whose weights the overlapped gather would deliver too late.

With `training.overlap` each rank updates its part of the weights. The next forward pass gathers the rest while it
computes: megatron-core waits for a bucket of weights when a module that holds one of them is called. A weight that is
read earlier, or whose module is never called, may still be the previous step's. Nothing fails, and the run is wrong.
"""

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megatron_blackmamba.engine.parts.optimizer import Built


class UngatheredParameter(RuntimeError):
    """A forward pass that does not wait for its weights; the message names them."""


def watch_first_forward(built: Built) -> None:
    """Watch where the forward pass gathers weights."""
    if built.reduced.ddp_config.overlap_param_gather:
        FirstForward(built.reduced, built.model)


class FirstForward(TorchFunctionMode):
    """Watch the first forward pass of `wrapper`, when all weights are still the same everywhere, then disappear.

    Raise UngatheredParameter if an operation reads a parameter before a module that holds it is called, or if no such
    module is called at all.
    """

    def __init__(self, wrapper: nn.Module, model: nn.Module):
        super().__init__()
        self.names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        """Names of parameters and of other handles of their numbers, such as `data`, by the tensor's id."""
        self.waiting = dict.fromkeys(self.names.values())
        self.early: list[str] = []
        self.handles: list[Tensor] = []
        """Other handles, kept alive so that no other tensor gets their id."""
        self.hooks = [module.register_forward_pre_hook(self._called) for module in model.modules()]
        self.hooks += [
            wrapper.register_forward_pre_hook(self._begin),
            wrapper.register_forward_hook(self._end, always_call=True),
        ]

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not _reads_an_attribute(function):
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and self.names.get(id(value)) in self.waiting:
                    self.early.append(self._waited(value))
            return function(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and id(args[0]) in self.names and result.data_ptr() == args[0].data_ptr():
            self.names[id(result)] = self.names[id(args[0])]
            self.handles.append(result)
        return result

    def _begin(self, *_: Any) -> None:
        self.__enter__()

    def _called(self, module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self._waited(parameter)

    def _waited(self, tensor: Tensor) -> str:
        name = self.names.get(id(tensor), "")
        self.waiting.pop(name, None)
        return name

    def _end(self, wrapper: nn.Module, inputs: Any, output: Any) -> None:
        self.__exit__(None, None, None)
        for hook in self.hooks:
            hook.remove()
        found = [*self.early, *self.waiting]
        if found and output is not None:  # None: forward raised, and that says more
            raise UngatheredParameter(
                f"weights are read before they are gathered: {', '.join(found)}. Have forward call the module that"
                " holds them before anything reads them, or set training.overlap=false."
            )


def _reads_an_attribute(function: Any) -> bool:
    """Tell whether `function` reads an attribute rather than numbers.

    megatron-core 0.19 asks each weight's `data` for its type while it waits for the weight.
    """
    return getattr(function, "__name__", "") == "__get__"

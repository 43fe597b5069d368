"""The hooks of a capture, and what they ask torch about the pass under way."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from ekfac.curvature.capture.capture import Capture


#: Reads the gradient of one tensor as that of another.
Read = Callable[[Tensor], Tensor]
#: A tensor whose gradient comes, and what that is read by, if it is of another form than is wanted.
Anchor = tuple[Tensor, Read | None]
#: Shape and strides.
Form = tuple[torch.Size, tuple[int, ...]]


class _Hook(ABC):
    """A hook that does not keep the capture alive, nor drag it along when a model is copied or saved."""

    def __init__(self, capture: weakref.ref[Capture]) -> None:
        self._capture = capture

    @property
    def capture(self) -> Capture | None:
        return self._capture()

    def __call__(self, *args: Any) -> Any:
        # What the compiler traces it would run once, and capture nothing.
        if torch.compiler.is_dynamo_compiling():
            return _outside(self, args)
        return None if torch._C._get_tracing_state() else self.run(*args)  # nor has torch.jit.trace anything to train

    @abstractmethod
    def run(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Do what the hook is for."""

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # torch.jit.script asks for it, of every hook
            raise AttributeError(
                "an optimizer of ekfac has hooks on this model, which torch.jit.script cannot compile: script it after "
                "opt.close(), or use torch.compile or torch.export, which leave hooks out"
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)(self._capture)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (_nothing,))


def _outside(hook: _Hook, args: tuple[Any, ...]) -> Any:
    """Run a hook where the compiler does not see it; :func:`run_hooks_in_compiled_models` keeps it out of here."""
    if hook.capture is not None:
        hook.capture.compiled = True
    return hook.run(*args)


def _nothing() -> None:
    """Stand in for the capture in an unpickled hook, which has none."""


class ForwardHook(_Hook):
    """After a call of a layer."""

    def run(self, module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> Any:
        # Torch leaves kwargs out where the hook is being taken off at this moment, since its capture is gone.
        capture = self._capture()
        return (
            None if capture is None or capture.forwards.here.quiet else capture.called(module, args, *kwargs_and_output)
        )


class EnterHook(_Hook):
    """Before a call of a module that hides its products."""

    def run(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.capture is not None:
            self.capture.enter(module)


class LeaveHook(_Hook):
    """After it."""

    def run(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.capture is not None:
            self.capture.leave(module)


class BeginHook(_Hook):
    """Before a forward of the whole model."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if self.capture is not None and module is self.capture.model:
            self.capture.begin(args, kwargs or {})


class EndHook(_Hook):
    """After a forward of the whole model."""

    def run(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.capture is not None and module is self.capture.model:
            self.capture.end(output)


class Mutable:
    """Hooks that can be taken away for a while: one that is not there costs nothing.

    Args:
        handles: Of the hooks.
    """

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles
        #: Those that are away, with where they belong.
        self.away: list[tuple[dict[int, Any], int, Any]] = []
        #: The threads that have asked.
        self._threads: set[int] = set()

    def mute(self, muted: bool) -> None:
        """Take them away, where no other hook is beside one and no other thread may need them; or put them back."""
        self._threads.add(threading.get_ident())
        if not muted or len(self._threads) > 1:
            self.restore()
        elif not self.away:
            for handle in self._handles:
                there, key = handle.hooks_dict_ref(), handle.id
                if there is not None and len(there) == 1 and key in there:
                    self.away.append((there, key, there.pop(key)))

    def restore(self) -> None:
        """Put them back."""
        for hooks, key, hook in reversed(self.away):
            hooks[key] = hook
        self.away.clear()


@functools.cache
def run_hooks_in_compiled_models() -> None:
    """Keep the compiler out of the hooks, and let it see whether a model has any.

    What it traces it would run once, and capture nothing. And it takes models that differ in their hooks alone for the
    same, unless told to look: what it had compiled for one without hooks, it would then run in place of ours. So it is
    told, and what it compiled before that is dropped, to be compiled anew when it is next called.
    """
    global _outside
    _outside = torch.compiler.disable(_outside)
    for room in ("ekfac.curvature", "ekfac.optim"):  # a compiled training step would compile each of them, for minutes
        torch._dynamo.trace_rules.add(room)
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._dynamo.reset()


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Take hooks off."""
    for handle in handles:
        handle.remove()
    handles.clear()


def calls_under_way(module: nn.Module) -> int:
    """Return how many calls of a module this thread is within."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return count


def inside_backward() -> bool:
    """Tell whether this thread is executing a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def inside_transform() -> bool:
    """Tell whether a transform of torch.func is under way: its gradients are returned, and never reach ``.grad``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def keeps_graph() -> bool:
    """Tell whether the backward pass under way keeps its graph, so that a second one may follow."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def anchor(output: Tensor) -> Anchor:
    """Return the tensor whose gradient is that of a layer's output, whatever is done in place to the output later.

    A linear layer on three dimensions gives out a view of a product on two. Once a view is changed in place, a backward
    pass no longer comes to it, but to what it is a view of. What reads the one's gradient as the other's comes with it,
    where they are not the same.
    """
    base = output._base if type(output) is Tensor and output._is_view() else None
    if base is None or not base.requires_grad or base.numel() != output.numel():
        return output, None
    if base.is_contiguous() and output.is_contiguous():
        return base, partial(Tensor.reshape, shape=output.shape)
    form, of_base = (output.shape, output.stride()), (base.shape, base.stride())
    return base, partial(_laid_out, form, of_base)


def _laid_out(form: Form, of_base: Form, d: Tensor) -> Tensor:
    """Lay a gradient out as what it is the gradient of, and view it as the output views that."""
    return torch.empty_strided(*of_base, dtype=d.dtype, device=d.device).copy_(d).as_strided(*form)

"""The hooks of a capture, and queries about the current forward or backward pass."""

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


#: Converts the gradient of a base to that of its view.
Read = Callable[[Tensor], Tensor]
#: The tensor that receives an output's gradient, and how to read that gradient if its form differs.
Anchor = tuple[Tensor, Read | None]
#: Shape and strides.
Form = tuple[torch.Size, tuple[int, ...]]


class _Hook(ABC):
    """A hook with only a weak reference to the capture, which is not copied or saved with the model."""

    def __init__(self, capture: weakref.ref[Capture]) -> None:
        self._capture = capture

    @property
    def capture(self) -> Capture | None:
        return self._capture()

    def __call__(self, *args: Any) -> Any:
        # If the compiler traced the hook, it would run only once, during tracing.
        if torch.compiler.is_dynamo_compiling():
            return _outside(self, args)
        return None if torch._C._get_tracing_state() else self.run(*args)  # do nothing under torch.jit.trace

    @abstractmethod
    def run(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Run the hook."""

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":  # torch.jit.script reads it from every hook
            raise AttributeError(
                "an ekfac optimizer has hooks on this model, which torch.jit.script cannot compile: script it after "
                "opt.close(), or use torch.compile or torch.export, which skip hooks"
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return type(self)(self._capture)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (_nothing,))


def _outside(hook: _Hook, args: tuple[Any, ...]) -> Any:
    """Run a hook outside of compiled code; :func:`run_hooks_in_compiled_models` disables compilation of this."""
    if hook.capture is not None:
        hook.capture.compiled = True
    return hook.run(*args)


def _nothing() -> None:
    """Return None, in place of the weak reference of an unpickled hook."""


class ForwardHook(_Hook):
    """Runs after a call of a layer."""

    def run(self, module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> Any:
        # torch omits kwargs if the hook is being removed at this moment, after its capture was deleted.
        capture = self._capture()
        return (
            None if capture is None or capture.forwards.here.quiet else capture.called(module, args, *kwargs_and_output)
        )


class EnterHook(_Hook):
    """Runs before a call of a module whose products are captured through torch's functions."""

    def run(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.capture is not None:
            self.capture.enter(module)


class LeaveHook(_Hook):
    """Runs after such a call."""

    def run(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.capture is not None:
            self.capture.leave(module)


class BeginHook(_Hook):
    """Runs before a forward of the whole model."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if self.capture is not None and module is self.capture.model:
            self.capture.begin(args, kwargs or {})


class EndHook(_Hook):
    """Runs after a forward of the whole model."""

    def run(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.capture is not None and module is self.capture.model:
            self.capture.end(output)


class Mutable:
    """Hooks that can be removed temporarily, to save the cost of calling them.

    Args:
        handles: The handles of the hooks.
    """

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles
        #: The removed hooks, with the dicts and keys they belong to.
        self.away: list[tuple[dict[int, Any], int, Any]] = []
        #: The threads that have called :meth:`mute`.
        self._threads: set[int] = set()

    def mute(self, muted: bool) -> None:
        """Remove hooks that are the only ones in their dict, unless several threads use them; or restore all."""
        self._threads.add(threading.get_ident())
        if not muted or len(self._threads) > 1:
            self.restore()
        elif not self.away:
            for handle in self._handles:
                there, key = handle.hooks_dict_ref(), handle.id
                if there is not None and len(there) == 1 and key in there:
                    self.away.append((there, key, there.pop(key)))

    def restore(self) -> None:
        """Restore the removed hooks."""
        for hooks, key, hook in reversed(self.away):
            hooks[key] = hook
        self.away.clear()


@functools.cache
def run_hooks_in_compiled_models() -> None:
    """Keep the compiler out of the hooks, and make it guard on their presence.

    If it traced a hook, the hook would run only once. And by default it does not distinguish models that differ only in
    their hooks, so it would reuse code compiled for a model without hooks. This turns the guard on, and drops code
    compiled before, which is compiled anew when it is next called.
    """
    global _outside
    _outside = torch.compiler.disable(_outside)
    for package in ("ekfac.curvature", "ekfac.optim"):  # compiling all of this in a training step would take minutes
        torch._dynamo.trace_rules.add(package)
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._dynamo.reset()


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Remove hooks."""
    for handle in handles:
        handle.remove()
    handles.clear()


def active_calls(module: nn.Module) -> int:
    """Return the number of calls of a module on this thread's stack."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return count


def inside_backward() -> bool:
    """Return whether this thread is executing a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def inside_transform() -> bool:
    """Return whether inside a torch.func transform, whose gradients are returned and never reach ``.grad``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def keeps_graph() -> bool:
    """Return whether the current backward pass retains its graph, so that another may follow."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def anchor(output: Tensor) -> Anchor:
    """Return the tensor that receives the gradient of a layer's output even if the output is later changed in place.

    The output of a linear layer on 3-D input is a view of a 2-D product. Once a view has been changed in place, the
    backward pass reaches its base instead, so the hook goes there; the base's gradient is then read in the view's form.
    """
    base = output._base if type(output) is Tensor and output._is_view() else None
    if base is None or not base.requires_grad or base.numel() != output.numel():
        return output, None
    if base.is_contiguous() and output.is_contiguous():
        return base, partial(Tensor.reshape, shape=output.shape)
    form, of_base = (output.shape, output.stride()), (base.shape, base.stride())
    return base, partial(_laid_out, form, of_base)


def _laid_out(form: Form, of_base: Form, d: Tensor) -> Tensor:
    """Copy a gradient into the memory layout of the base, and view it as the output views the base."""
    return torch.empty_strided(*of_base, dtype=d.dtype, device=d.device).copy_(d).as_strided(*form)

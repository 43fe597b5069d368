"""Which parameters a backward pass brings gradients to."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from ekfac.curvature.blocks import Block
from ekfac.optim.distributed.shards import is_sharded
from ekfac.optim.statistics.gradients import GradientWatch
from ekfac.optim.statistics.partition import Partition


class Reach:
    """Asks autograd, within a backward pass, where that pass goes.

    Args:
        partition: The parameters.
        watch: Told of a pass that brings gradients to parameters which are sharded: it leaves nothing in these itself.
    """

    def __init__(self, partition: Partition, watch: GradientWatch) -> None:
        self._partition = partition
        self._watch = watch
        #: What adds to each parameter's ``.grad`` in a backward pass.
        self.accumulators: dict[nn.Parameter, Node] = {}
        #: The pass that was last asked for, and what is known of it: a loss with derivatives asks for many products.
        self._of_pass: tuple[int, dict[Block | None, bool]] = -1, {}

    def reaches_parameters(self, block: Block | None) -> bool:
        """Tell whether the pass under way brings a gradient to a block's parameters, or to any of the model's."""
        if self._partition.gathers or self._partition.sharded:
            return self._ask(block)
        task = torch._C._current_graph_task_id()
        if self._of_pass[0] != task:
            self._of_pass = task, {}
        known = self._of_pass[1]
        if block not in known:
            known[block] = self._ask(block)
        return known[block]

    def _ask(self, block: Block | None) -> bool:
        found = any(map(self._reaches, self._partition.everything if block is None else block.parameters.values()))
        if found and self._partition.sharded:
            self._watch.backward_runs()
        return found

    def _reaches(self, parameter: nn.Parameter) -> bool:
        if not parameter.requires_grad:
            return False
        if self._partition.gathers:
            return self._reaches_gathered(parameter)
        return self._executes(parameter, parameter)

    def _reaches_gathered(self, parameter: nn.Parameter) -> bool:
        """Tell the same of a parameter that is used in a gathered form, which is known while its layer has it."""
        module, name = self._partition.places[parameter]
        used = module._parameters[name]
        return used is None or self._executes(parameter, used) or is_sharded(used)

    def _executes(self, parameter: nn.Parameter, used: nn.Parameter) -> bool:
        known = self.accumulators.get(parameter)
        try:
            if known is not None and torch._C._will_engine_execute_node(known):
                return True
            # The first time, or the parameter's memory was replaced since and with it what adds to its gradient.
            found = self.accumulators[parameter] = accumulator_of(used)
            return bool(torch._C._will_engine_execute_node(found))
        except RuntimeError:
            # torch.autograd.grad of the parameter itself: for .grad, unless it is to be differentiated.
            return not torch.is_grad_enabled()


def accumulator_of(parameter: nn.Parameter) -> Node:
    """Return what adds to a parameter's gradient."""
    if not parameter.is_leaf:
        return get_gradient_edge(parameter).node
    with torch.enable_grad():  # what get_gradient_edge does, in a third of its time
        view = parameter.view_as(parameter).grad_fn
    node = None if view is None else view.next_functions[0][0]
    assert node is not None
    return node

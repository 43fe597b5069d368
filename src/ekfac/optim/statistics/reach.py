"""Finds out which parameters a backward pass will reach."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from ekfac.curvature.blocks import Block
from ekfac.optim.distributed.shards import is_sharded
from ekfac.optim.statistics.gradients import GradientWatch
from ekfac.optim.statistics.partition import Partition


class Reach:
    """Asks autograd, during a backward pass, which nodes the pass will execute.

    Args:
        partition: The parameters.
        watch: Notified of passes that reach sharded parameters, whose own hooks do not fire.
    """

    def __init__(self, partition: Partition, watch: GradientWatch) -> None:
        self._partition = partition
        self._watch = watch
        #: The AccumulateGrad node of each parameter.
        self.accumulators: dict[nn.Parameter, Node] = {}
        #: The last pass, and cached answers for it: a loss with derivatives asks many times.
        self._of_pass: tuple[int, dict[Block | None, bool]] = -1, {}

    def reaches_parameters(self, block: Block | None) -> bool:
        """Return whether the current pass reaches any parameter of a block, or of the model if None."""
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
        """Return the same for a parameter that is used in gathered form, as long as its layer holds that."""
        module, name = self._partition.places[parameter]
        used = module._parameters[name]
        return used is None or self._executes(parameter, used) or is_sharded(used)

    def _executes(self, parameter: nn.Parameter, used: nn.Parameter) -> bool:
        known = self.accumulators.get(parameter)
        try:
            if known is not None and torch._C._will_engine_execute_node(known):
                return True
            # The first time, or after the parameter's storage, and with it the node, was replaced.
            found = self.accumulators[parameter] = accumulator_of(used)
            return bool(torch._C._will_engine_execute_node(found))
        except RuntimeError:
            # torch.autograd.grad with respect to the parameter: counts as .grad unless it has create_graph=True.
            return not torch.is_grad_enabled()


def accumulator_of(parameter: nn.Parameter) -> Node:
    """Return a parameter's AccumulateGrad node."""
    if not parameter.is_leaf:
        return get_gradient_edge(parameter).node
    with torch.enable_grad():  # what get_gradient_edge does, three times as fast
        view = parameter.view_as(parameter).grad_fn
    node = None if view is None else view.next_functions[0][0]
    assert node is not None
    return node

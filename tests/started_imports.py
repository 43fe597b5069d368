"""What commands of the tests import, and torch.optim imports when an optimizer is made: once for all of them."""

import gc

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import ekfac.cli.main
import ekfac.lab.reproduce
import ekfac.lab.search.plan
import ekfac.lab.search.sweep
import ekfac.lab.suite
import ekfac.lab.train
import ekfac.optim.ekfac
import ekfac.optim.kfac  # noqa: F401

torch.optim.SGD([torch.zeros(1, requires_grad=True)])
gc.collect()
gc.freeze()  # collections pass over it, in every process that is forked

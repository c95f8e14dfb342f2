"""Sums in one launch: ranks read each other's parts from memory shared between the GPUs of a machine.

The sum of a decode step has some hundred kilobytes, for which NCCL's ring or tree takes several trips.  One-shot, each
rank adds all parts itself, in the order of ranks, so all have the same bits; it reads as many times the bytes as there
are ranks.  Two-shot, for some megabytes, each rank adds a share of the numbers and gives it to all: whatever its order
is, all have the bits of that rank.  For tens of megabytes a rank lets the switch between GPUs add its share and give it
to all, where there is such a switch (multimem, NVLink SHARP): all have the same bits, in an order that the switch
chooses.  Invariant numerics add parts up by themselves (``OrderedComm``) and call none of these.  Tensors that are
larger, of another dtype or not contiguous go through NCCL, and so do all if the memory is not available, or a trial of
it in processes of their own was not right.

A sum that is small enough for one-shot is also added to the residual stream and normalised in the launch that sums, by
a kernel of this project (``engine/kernels/summed_norm.py``).

Legend: S bytes of the largest sum · T new tokens in the step · D model dim · R ranks
Owns: the choice of the way of a sum.  Does not know: NCCL (``torch.py``), the calling layers.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from engine.plugins.comm.symmetric.memory import (
    ALIGNMENT,
    DTYPES,
    Limits,
    PeerMemory,
    SharedMemory,
    has_summing_switch,
)
from engine.plugins.comm.symmetric.trial import MemoryTrial, new_trial
from engine.plugins.comm.torch import TorchComm, TorchCommOptions
from engine.plugins.hookspecs import CommContext, hookimpl
from engine.plugins.options import decode_options
from engine.types.errors import PluginError

log = logging.getLogger(__name__)

CALLBOARD_PLUGIN = {"api": 1, "devices": ["cuda"]}
NAME = "comm.symmetric"


class SymmetricOptions(TorchCommOptions, frozen=True):
    """Options of the plugin, with those of NCCL.

    one_shot_kb: the largest sum that each rank computes whole.
    two_shot_kb: the largest sum of which each rank computes a share, beyond that.
    by_switch_kb: the largest sum that the switch between GPUs computes, where it can, beyond that; then NCCL.
    trial_s: how long the trial of the memory may take, which the first start on a machine makes; 0 for none."""

    one_shot_kb: int = 256
    two_shot_kb: int = 8192
    by_switch_kb: int = 32768
    trial_s: float = 60.0


class SymmetricComm:
    """A ``Comm`` with one-launch sums, and NCCL for all else."""

    exchanges = True

    def __init__(
        self,
        library: TorchComm,
        share: Callable[[Limits], SharedMemory],
        limits: Limits,
        device: str,
        trial: MemoryTrial | None = None,
        switch_trial: MemoryTrial | None = None,
    ) -> None:
        """Set up the group, on all ranks together.

        library: for all other collectives.  share: allocates the memory, or raises.  trial: of the memory, before this
        process touches it; it is not repeated where all ranks know of one.  switch_trial: of the switch, behind it;
        without one the switch does not sum."""
        self.rank, self.size = library.rank, library.size
        self.capturable = library.capturable
        self._library = library
        self._limits = limits
        self._device = device
        self._memory: SharedMemory | None = None
        problem = self._tried(trial)
        if not problem:
            self._limits = self._without_untried(limits, switch_trial)
            try:
                self._memory = share(self._limits)
            except (RuntimeError, AttributeError, ImportError) as error:
                problem = _plain(error)
            if not self._everywhere(self._memory is not None):
                self._memory, problem = None, problem or "another rank cannot"
        self.norms = self._memory is not None
        if problem:
            log.warning("%s: every sum goes through NCCL, as GPUs cannot read each other's memory (%s)", NAME, problem)

    def _without_untried(self, limits: Limits, switch_trial: MemoryTrial | None) -> Limits:
        """Return the limits of the ways that work everywhere: without the switch if its trial was not right."""
        if not self._everywhere(switch_trial is not None):
            return limits._replace(by_switch=0)
        problem = self._tried(switch_trial)
        if problem:
            log.warning("%s: the largest sums go through NCCL, as the switch does not sum (%s)", NAME, problem)
            return limits._replace(by_switch=0)
        return limits

    def _tried(self, trial: MemoryTrial | None) -> str:
        """Return why the memory cannot be used by a trial of all ranks; '' if it can, or there is no trial."""
        if trial is None:
            return ""
        if self._everywhere(trial.known is not None):
            if self._everywhere(not trial.known):
                return ""
            return f"{trial.known or 'another rank has kept a reason'}; kept from an earlier start in {trial.path}"
        problem = ""
        try:
            trial.run()
        except (RuntimeError, OSError) as error:
            problem = _plain(error)
        if not self._everywhere(not problem):
            problem = problem or "another rank's trial was not right"
        else:
            log.info("%s: GPUs read each other's memory (tried in processes of their own)", NAME)
        trial.keep(problem)
        return problem

    def _everywhere(self, here: bool) -> bool:
        """Return whether something is so on every rank: a rank that goes the other way would wait forever."""
        able = self._library.all_reduce(torch.tensor([float(here)], device=self._device))
        return round(float(able)) == self.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self._memory is None or not self._fits(tensor):
            return self._library.all_reduce(tensor)
        self._memory.sum_into(tensor)
        return tensor

    def add_norm(self, x_TD: Tensor, part_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor | None:
        return None if self._memory is None else self._memory.add_norm(x_TD, part_TD, weight_D, eps)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return self._library.all_gather(tensor, dim)

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self._library.all_to_all(tensor, sent, received)

    def close(self) -> None:
        self._memory = None
        self._library.close()

    def _fits(self, tensor: Tensor) -> bool:
        """Whether a tensor can be summed in shared memory; the answer is the same on every rank."""
        num_bytes = tensor.nbytes
        # A multiple of the ranks' loads: two-shot, all shares are then equal.
        whole = 0 < num_bytes <= self._limits.most and num_bytes % (ALIGNMENT * self.size) == 0
        return whole and tensor.dtype in DTYPES and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def _plain(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@hookimpl
def callboard_comm(context: CommContext) -> SymmetricComm:
    """Build the communicator for ranks with a GPU each, on one machine."""
    options = decode_options(NAME, context.options, SymmetricOptions)
    if context.device != "cuda":
        raise PluginError(f"{NAME} connects NVIDIA GPUs, not {context.device!r}; set plugins.comm=torch")
    library = TorchComm(context, options)
    two_shot = max(options.one_shot_kb, options.two_shot_kb) << 10
    by_switch = options.by_switch_kb << 10
    able = context.size > 1 and by_switch > two_shot and has_summing_switch()
    peers = Limits(options.one_shot_kb << 10, two_shot)
    limits = peers._replace(by_switch=by_switch * able)

    def share(usable: Limits) -> SharedMemory:
        return PeerMemory(PrefixStore("symmetric", library.store), context, usable)

    trial = new_trial(context, peers, options.trial_s)
    switch_trial = new_trial(context, limits, options.trial_s) if able else None
    return SymmetricComm(library, share, limits, context.device, trial, switch_trial)

"""The processes that train one model together. torchrun starts them; without it there is one.

Every rank holds the whole model and takes a slice of every batch; gradients are added up once a step, so that all
make the same update. What is decided together (to stop, to call a loss the best) is decided from the same numbers.
"""

import contextlib
import datetime
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.devices import pick_device
from runtime.errors import EnvironmentFault, UserError

TIMEOUT = datetime.timedelta(minutes=10)  # the longest that ranks wait for each other, at the start and in a run


class Ranks:
    """This process, number `rank` of `count`; `first` is the one that talks and saves."""

    def __init__(self) -> None:
        self.rank, self.count = _place("RANK", "WORLD_SIZE")
        self.local_rank, self.local_count = _place("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        self.first = self.rank == 0

    def meet(self, asked: str) -> torch.device:
        """Wait for the others and return this rank's own device.

        UserError if the device is not there, EnvironmentFault if the others cannot be reached.
        """
        device = pick_device(asked, self.local_rank if self.count > 1 else None)
        if self.count > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.local_count))
            try:
                dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
            except (RuntimeError, ValueError) as error:
                raise EnvironmentFault(
                    f"process {self.rank} of {self.count} cannot reach the others ({_first_line(error)}): start it "
                    "with torchrun, or unset WORLD_SIZE"
                ) from None
        return device

    def share(self, batch_size: int, micro_batch_size: int | None) -> tuple[int, range]:
        """Rows of a micro-batch, and which micro-batches of a batch are this rank's; UserError if none would fit."""
        if batch_size % self.count:
            raise UserError(f"batch_size {batch_size} cannot be shared among {self.count} processes: it must divide")
        size = micro_batch_size or batch_size // self.count
        accumulation = batch_size // size
        if accumulation % self.count:
            raise UserError(
                f"batch_size {batch_size} in micro-batches of {size} is {accumulation} of them, which cannot be "
                f"shared among {self.count} processes: lower micro_batch_size or start another number"
            )
        own = accumulation // self.count
        return size, range(self.rank * own, (self.rank + 1) * own)

    def gather(self, *values: float) -> Tensor:
        """Everybody's values, float64 (count, number of values)."""
        table = torch.zeros(self.count, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor(values, dtype=torch.float64)
        if self.count > 1:
            self._told(dist.all_reduce, table)
        return table

    def agree(self, what: str, value: str) -> None:
        """UserError if the ranks do not all have the same value of `what`."""
        number = int.from_bytes(hashlib.sha256(value.encode()).digest()[:6], "big")  # a float64 holds it exactly
        if len(set(self.gather(number).flatten().tolist())) > 1:
            raise UserError(f"the {self.count} processes do not have the same {what}: start all of them alike")

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all ranks into every tensor, in one message."""
        if self.count > 1:
            together = torch.cat([tensor.flatten() for tensor in tensors])
            self._told(dist.all_reduce, together)
            for tensor, part in zip(tensors, together.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    @contextlib.contextmanager
    def one_first(self) -> Iterator[None]:
        """The first rank of a machine goes through by itself, the others after it."""
        if self.local_rank:
            self.gather()
        try:
            yield
        finally:
            if not self.local_rank:
                self.gather()

    def close(self) -> None:
        """Leave the others, who are done as well."""
        if self.count > 1:
            dist.destroy_process_group()

    def _told(self, call: Callable[..., object], argument: object) -> None:
        """Do what needs all ranks; EnvironmentFault if one of them is gone."""
        try:
            call(argument)
        except (RuntimeError, ValueError) as error:
            raise EnvironmentFault(
                f"process {self.rank} of {self.count} has lost another ({_first_line(error)}): what went wrong stands "
                "above or in that one's output; if the run has saved, --resume goes on with it"
            ) from None


def _place(number: str, count: str) -> tuple[int, int]:
    """Two of torchrun's variables: which of how many; the only one if they are not set."""
    texts = os.environ.get(number) or "0", os.environ.get(count) or "1"
    if not all(text.isdecimal() for text in texts) or not int(texts[0]) < int(texts[1]):
        told = f"{number} is {texts[0]} and {count} is {texts[1]}"
        raise UserError(f"{told}, which is no number below another: start with torchrun, or unset both")
    return int(texts[0]), int(texts[1])


def _first_line(error: Exception) -> str:
    """What went wrong, without where in its library's source: gloo begins with that in brackets."""
    return re.sub(r"^\[[^]]*\]:? *", "", str(error).strip().split("\n")[0]).split(". This ")[0]

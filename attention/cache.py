"""What decoding keeps of the tokens already seen."""

import torch
from torch import Tensor


class LayerCache:
    """One layer's part: for every (heads, width) that the design asks for, a (B, heads, slots, width) buffer.

    There is a slot for each of the `room` positions or, where a query sees no more than a window, for the last
    `window` of them: position p lies in slot p % slots, in place of one that nobody will look at any more.
    """

    def __init__(
        self, batch_size: int, room: int, shapes: list[tuple[int, int]], like: Tensor, window: int | None = None
    ):
        self.room = room
        self.slots = min(room, window or room)
        self.buffers = [like.new_empty(batch_size, heads, self.slots, width) for heads, width in shapes]
        self.length = 0

    def append(self, *new: Tensor) -> list[Tensor]:
        """Store the T newest positions, each (B, heads, T, width); return all that any of them may see.

        Where every position has a slot of its own these are views, oldest position first. Beyond, one new position
        gets the whole ring as it lies, since attention does not ask for the order; several get a copy in order.
        """
        start, end = self.length, self.length + new[0].size(-2)
        if end > self.room:
            raise ValueError(f"the cache has room for {self.room} positions and {end} were given")
        self.length = end
        pairs = list(zip(self.buffers, new, strict=True))
        if end <= self.slots:
            for buffer, part in pairs:
                buffer[:, :, start:end] = part
            return [buffer[:, :, :end] for buffer in self.buffers]
        if end - start == 1:
            for buffer, part in pairs:
                buffer[:, :, start % self.slots, None] = part
            return self.buffers
        before = torch.arange(max(0, start - self.slots + 1), start)  # what the first new position still sees
        kept = torch.arange(max(start, end - self.slots), end)
        seen = [torch.cat((buffer[:, :, before % self.slots], part), dim=2) for buffer, part in pairs]
        for buffer, part in pairs:
            buffer[:, :, kept % self.slots] = part[:, :, kept - start]
        return seen  # (B, heads, at most slots - 1 + T, width)


class KVCache:
    """The caches of all layers. A model that is given one takes its input as the tokens that come next."""

    def __init__(self, layers: list[LayerCache]):
        self.layers = layers

    @property
    def length(self) -> int:
        """Positions seen so far."""
        return self.layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.nbytes for layer in self.layers for buffer in layer.buffers)

    def clear(self) -> None:
        """Forget every position and keep the room."""
        for layer in self.layers:
            layer.length = 0

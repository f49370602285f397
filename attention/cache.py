"""What decoding keeps of the tokens already seen."""

from torch import Tensor


class LayerCache:
    """One layer's part: for every (heads, width) that the design asks for, a (B, heads, room, width) buffer."""

    def __init__(self, batch_size: int, room: int, shapes: list[tuple[int, int]], like: Tensor):
        self.buffers = [like.new_empty(batch_size, heads, room, width) for heads, width in shapes]
        self.room = room
        self.length = 0

    def append(self, *new: Tensor) -> list[Tensor]:
        """Store the T newest positions, each (B, heads, T, width); return everything seen, as views."""
        end = self.length + new[0].size(-2)
        if end > self.room:
            raise ValueError(f"the cache has room for {self.room} positions and {end} were given")
        for buffer, part in zip(self.buffers, new, strict=True):
            buffer[:, :, self.length : end] = part
        self.length = end
        return [buffer[:, :, :end] for buffer in self.buffers]


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

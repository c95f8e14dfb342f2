"""The memory that must stay free next to a KV pool, by what takes it.

Owns: the sum, and the part of an error that names them.  Does not know: how anything is measured.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that must stay free next to the pool.

    activation_bytes: the largest step.
    graph_bytes: all graphs.
    product_bytes: the products that oneDNN compiles.
    process_bytes: other processes in the same memory.
    attention_bytes: the workspaces of attention backends.
    feature_bytes: (name for errors, bytes) of each feature that allocates its memory only when it is used."""

    activation_bytes: int = 0
    graph_bytes: int = 0
    product_bytes: int = 0
    process_bytes: int = 0
    attention_bytes: int = 0
    feature_bytes: tuple[tuple[str, int], ...] = ()

    @property
    def total(self) -> int:
        """The sum of all parts."""
        mine = self.activation_bytes + self.graph_bytes + self.product_bytes + self.process_bytes + self.attention_bytes
        return mine + sum(num_bytes for _, num_bytes in self.feature_bytes)

    def __str__(self) -> str:
        parts = {
            "a step": self.activation_bytes,
            "graphs": self.graph_bytes,
            "compiled products": self.product_bytes,
            "processes": self.process_bytes,
            "attention": self.attention_bytes,
            **dict(self.feature_bytes),
        }
        return ", ".join(f"{gigabytes(num_bytes)} for {what}" for what, num_bytes in parts.items() if num_bytes)


def gigabytes(num_bytes: int) -> str:
    """Return a number of bytes as a person reads it."""
    return f"{num_bytes / 1e9:.2f} GB"

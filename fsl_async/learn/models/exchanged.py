"""Which tensors of a model are exchanged, where they are not its parameters one by one."""

from attrs import frozen


@frozen
class Part:
    """A tensor of the module, by name, or its transpose."""

    name: str
    is_transposed: bool = False


@frozen
class Exchanged:
    """A tensor of the manifest: tensors of the module, joined along their first dimension."""

    name: str
    parts: tuple[Part, ...]


@frozen
class View:
    """The exchanged tensors, in flat order.

    checks_frozen: whether the values of all others must be the same at all clients.
    """

    tensors: tuple[Exchanged, ...]
    checks_frozen: bool = True

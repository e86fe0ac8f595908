"""Pure role machines: `machine.handle(event, now) -> list[effect]` and `machine.next_deadline()`."""

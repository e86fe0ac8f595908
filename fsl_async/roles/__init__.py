"""Role machines, all pure: `handle(event, now) -> list[effect]` and `next_deadline()`."""

"""The processes: each connects a machine of `roles` with sockets, disk and a training thread."""

"""The processes: each joins a machine of `roles` with sockets, disk and a training thread. They decide nothing."""

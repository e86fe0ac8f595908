"""What carries a machine's effects out: sockets, disk, the training thread."""

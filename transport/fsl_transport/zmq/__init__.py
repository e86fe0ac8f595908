"""The ZeroMQ link: sockets, encryption, admission of connections."""

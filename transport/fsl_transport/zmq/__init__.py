"""The network by ZeroMQ: ROUTER and DEALER sockets with CURVE."""

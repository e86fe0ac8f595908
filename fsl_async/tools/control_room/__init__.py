"""The control room: a page on loopback that shows a run from its journals (docs/adr/0129).

A process of its own reads; the parameter server knows nothing of it. Needs aiohttp (extra `web`).

watched     the journals of a run, read as they grow
snapshot    what the page shows of a node now, as plain values                             pure
feed        what a page has not got yet of a node's history                                pure
gate        which requests are answered, and with which headers                            pure
server      HTTP and server-sent events
assets      HTML, CSS, JavaScript; uPlot 1.6.32 with its licence
"""

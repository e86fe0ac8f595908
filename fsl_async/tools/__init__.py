"""Programs beside the runtime: simulator, benchmarks, faults, comparison, demo, network
laboratory.
"""

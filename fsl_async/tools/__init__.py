"""Programs beside the runtime: simulator, faults, comparison, demo, trackers, exports."""

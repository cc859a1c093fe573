"""Models in several processes: their observers merged, wrappers taken off, differences told."""

"""Recurrent modules as custom modules: a cell prepared once, and a loop over time around it."""

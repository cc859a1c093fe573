"""Sizes in a captured model: who reads them, where they come from, and which a call may have."""

"""The recurrent modules themselves: the contract of torch.nn around layers of cells."""

"""The observed and converted recurrent modules: layers of cells behind the calling contract of torch.nn."""

"""A converted model that is fed its sequences in pieces."""
